"""Tests that examples/one_file_ppo.py trains as jppo does with the same random draws."""

import ast
import importlib.util

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lenient import lenient
from snippets import ROOT

import jppo
from jppo.ppo.minibatches import epoch_keys, minibatch_indices
from jppo.ppo.rollout import rollout_keys
from jppo.ppo.types import derive_key

PATH = ROOT / "examples/one_file_ppo.py"
UPDATES = 5
SIZES = {"total_steps": UPDATES * 256, "num_envs": 8, "num_steps": 32}
LIMIT = 20  # steps; a random policy balances for 22 on average, so episodes end in both ways


def load():
    """Returns the file as a module."""
    spec = importlib.util.spec_from_file_location("one_file_ppo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_file():
    return load()


def make_agent():
    """Returns jppo's agent and hyperparameters for the settings of the file."""
    config = load().Config(**SIZES)
    sizes = {name: getattr(config, name) for name in ("num_envs", "num_steps", "num_epochs", "num_minibatches")}
    names = ("gamma", "gae_lambda", "clip_eps", "vf_coef", "ent_coef", "max_grad_norm")
    rate = jppo.schedules.linear(config.learning_rate, 0.0)
    hyperparams = jppo.Hyperparams(learning_rate=rate, **{name: getattr(config, name) for name in names})
    env = jppo.make_env("CartPole-v1", max_steps_in_episode=LIMIT)
    settings = jppo.PPOConfig(clip_value=False, **sizes)
    return jppo.make_anakin(env, settings, total_steps=config.total_steps), hyperparams


def layers(params):
    """Returns the kernels and biases of jppo's network under the names of the file's network."""
    params = params["params"]
    actor, critic = ([*params[name].values()] for name in ("actor", "critic"))
    dense = [*actor, params["policy"], *critic, params["value"]]
    return {"params": {f"Dense_{number}": layer for number, layer in enumerate(dense)}}


def draw_as(agent, start):
    """Returns functions that replace those of the file that draw: they give the draws of `agent` after `start`."""
    steps, envs, minibatches = (getattr(agent.config, name) for name in ("num_steps", "num_envs", "num_minibatches"))

    def init(key, network, env, env_params, num_envs):
        state = start.collect
        return layers(start.train.policy_state.params), state.env_state, state.obs, (state.key, start.train.key)

    def split_update_key(key, config):
        streams, update_key = key
        next_streams, action_keys, env_keys = rollout_keys(streams, steps)
        strata = jnp.arange(agent.config.effective_strata)
        shuffle_keys = epoch_keys(derive_key(update_key, "shuffle"), agent.config, steps * envs, strata)
        return action_keys, env_keys, shuffle_keys, (next_streams, derive_key(update_key, "next update"))

    def sample_actions(keys, logits):
        return jax.vmap(lambda key, logits: jppo.Categorical(logits).sample(seed=key))(keys, logits)

    def shuffle(keys, size):
        return minibatch_indices(keys, steps, envs, minibatches).ravel()

    return init, split_update_key, sample_actions, shuffle


@pytest.fixture(scope="module")
def jppo_run():
    """Returns the agent, its state before the first update, and its state and metrics after the last one."""
    with lenient():
        agent, hyperparams = make_agent()
        start = agent.init(jax.random.key(0), hyperparams)
        state, metrics = jax.jit(agent.train)(jax.random.key(0), hyperparams)
    return agent, start, state, metrics


def train_file(one_file, monkeypatch, agent, start):
    """Returns the parameters and metrics of the file's run with the draws of jppo's run."""
    for function in draw_as(agent, start):
        monkeypatch.setattr(one_file, function.__name__, function)
    env, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=LIMIT)
    with lenient():
        return jax.jit(one_file.make_train(env, params, one_file.Config(**SIZES)))(jax.random.key(1))


def largest_difference(x, y):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(abs(x - y).max()), x, y)))


def test_file_trains_as_jppo_does(one_file, monkeypatch, jppo_run):
    agent, start, state, theirs = jppo_run
    params, metrics = train_file(one_file, monkeypatch, agent, start)
    before, after = (layers(run.train.policy_state.params) for run in (start, state))
    assert largest_difference(before, after) > 0.01
    assert largest_difference(params, after) < 1e-5
    names = {"policy_loss": "loss/policy", "value_loss": "loss/value", "entropy": "policy/entropy"}
    for name, their_name in (names | {"return": "episode/return_mean"}).items():
        np.testing.assert_allclose(metrics[name], theirs[their_name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_comparison_sees_time_limits_that_count_as_terminations(one_file, monkeypatch, jppo_run):
    agent, start, state, _ = jppo_run
    gae = one_file.gae
    monkeypatch.setattr(one_file, "gae", lambda rollout, *rest: gae(rollout._replace(terminated=rollout.done), *rest))
    params, _ = train_file(one_file, monkeypatch, agent, start)
    assert largest_difference(params, layers(state.train.policy_state.params)) > 1e-3


def test_file_draws_keys_of_the_stated_shapes_and_each_once(one_file):
    config = one_file.Config(num_envs=3, num_steps=4, num_epochs=2)
    keys = one_file.split_update_key(jax.random.key(0), config)
    assert [key.shape for key in keys] == [(4,), (4, 3), (2,), ()]
    drawn = np.concatenate([jax.random.key_data(key).reshape(-1, 2) for key in keys])
    assert len(np.unique(drawn, axis=0)) == len(drawn) == 19


def test_file_is_short_and_imports_four_packages():
    text = PATH.read_text()
    assert len(text.splitlines()) <= 220
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in imported}
    assert packages - {"dataclasses", "time", "typing", "sys"} == {"jax", "flax", "optax", "gymnax"}
