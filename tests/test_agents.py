"""Tests environments with several agents: rows, inactive agents, time limits, and the update without inactive rows."""

import functools
import importlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL
from gymnasium import spaces
from jax.sharding import Mesh, PartitionSpec
from lenient import lenient
from parallel_probes import LIMIT, Immortal, Masked, Team, Uneven, Vanishing, duo

import jppo
from jppo.actors.env_runner import EnvRunner
from jppo.actors.sebulba import make_sebulba
from jppo.config.ray import RayConfig, spread_envs
from jppo.envs.base import Step
from jppo.envs.contract import BrokenContractError
from jppo.envs.gymnasium import make_host_env
from jppo.envs.host_families import host_env_names
from jppo.envs.spaces import ObsSpec
from jppo.networks.actor_critic import make_network
from jppo.ppo.anakin import make_anakin
from jppo.ppo.learner import _weights, make_learner
from jppo.ppo.losses import ppo_loss
from jppo.ppo.policy import make_policy, prepare_obs
from jppo.ppo.rollout import collect, episode_stats
from jppo.ppo.types import Batch, Episode, Transition
from jppo.runs.render import check_drawable, play_gif

ACTIVE = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 1]], bool)  # of Team, per step of an episode


def config_of(**fields):
    return SMALL(
        **{"num_envs": 6, "num_steps": 10, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (4,)} | fields
    )


def test_rows_are_the_agents_of_each_environment():
    env = make_host_env(Team)
    assert (env.num_agents, env.obs_spec.shape, env.action_spec.num_actions) == (3, (3,), 2)
    envs = env.make([7, 8, 9, 1, 2, 3])
    assert [team.seed for team in envs._vector.envs if envs.reset() is not None] == [7, 1]
    number = np.array([0, 1, 2])
    episode = envs._vector.envs[0].episode
    for step in range(2 * LIMIT):
        time, active = step % LIMIT, ACTIVE[step % LIMIT]
        np.testing.assert_array_equal(envs.active, np.tile(active, 2))
        after = envs.step(np.zeros(6, np.int32))
        reward, terminated, truncated = (np.reshape(x, (2, 3))[1] for x in after[1:4])
        np.testing.assert_array_equal(reward, np.where(active, 10 * number + time, 0))
        np.testing.assert_array_equal(terminated, ~active | ((number == 0) & (time == 1)))
        np.testing.assert_array_equal(truncated, active & (time == LIMIT - 1))
        ended = [i for i in range(6) if active[i % 3] and (terminated | truncated)[i % 3]]
        assert sorted(after.final_obs) == ended
        for i in ended:
            np.testing.assert_array_equal(after.final_obs[i], [i % 3, episode + step // LIMIT, time + 1])
        following = ACTIVE[(step + 1) % LIMIT]
        start = [episode + (step + 1) // LIMIT, (step + 1) % LIMIT]
        expected = [[i, *start] if following[i] else [0, 0, 0] for i in range(3)]
        np.testing.assert_array_equal(after.obs, expected * 2)


def value_of_time(obs):
    """Returns known values of observations [..., 3]."""
    return obs[..., 0] + 0.5 * obs[..., 2] + 1.0


class Telling:
    """A network whose values are known."""

    def init(self, key, obs):
        return {}

    def apply(self, params, obs):
        rows = len(obs)
        return jppo.Categorical(jnp.zeros((rows, 2))), value_of_time(obs)


def test_host_rollouts_bootstrap_truncated_agents_and_count_their_episodes_only():
    agent = make_sebulba(Team, config_of(), network=Telling(), total_steps=60)
    key = jax.random.key(0)
    runner = EnvRunner(agent.runner_spec(key), np.arange(6))
    rollout, stats, *_ = runner.collect(jax.device_get(agent.init(key).policy_state), 0.9)
    runner.close()
    active = np.tile(ACTIVE, (2, 2))
    np.testing.assert_array_equal(rollout.active, active)
    assert rollout.terminated[~active].all()
    assert not rollout.reward[~active].any()
    number, time = np.tile([0, 1, 2], 2), np.arange(10)[:, None] % LIMIT
    successor = np.stack(np.broadcast_arrays(number, 0 * time, time + 1), axis=-1)
    expected = np.where(rollout.terminated, 0.0, value_of_time(successor))
    np.testing.assert_allclose(rollout.next_value[active], expected[active])
    lengths = np.array([2, 5, 4] * 4)
    assert stats.returns.count == stats.lengths.count == len(lengths)
    np.testing.assert_allclose(stats.lengths.mean, lengths.mean(), rtol=1e-6)
    returns = [0 + 1, *[sum(10 + t for t in range(5))], *[sum(20 + t for t in range(1, 5))]]
    np.testing.assert_allclose(stats.returns.mean, np.mean(returns), rtol=1e-6)
    assert stats.discounted.count == active.sum()


def test_device_rollouts_agree_with_the_environment():
    agent = make_anakin(duo(), config_of(num_envs=4), total_steps=40)
    state = jax.jit(agent.init)(jax.random.key(0))
    assert state.collect.env_state.shape == (2,)
    roll = jax.jit(functools.partial(collect, agent.env, agent.policy, 10))
    state, rollout, stats = roll(state.train.policy_state, state.collect, 0.9)
    active = np.tile(np.array([[1, 1], [1, 1], [0, 1], [0, 1], [0, 1]], bool), (2, 2))
    np.testing.assert_array_equal(rollout.active, active)
    np.testing.assert_array_equal(state.active, [True] * 4)
    number, time = np.tile([0, 1], 2), np.arange(10)[:, None] % LIMIT
    np.testing.assert_array_equal(rollout.reward, np.where(active, 10 * number + time, 0))
    np.testing.assert_array_equal(rollout.obs, np.stack(np.broadcast_arrays(number, time), axis=-1))
    np.testing.assert_array_equal(rollout.truncated, active & (time == LIMIT - 1))
    assert (stats.returns.count, stats.lengths.mean) == (8, 3.5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
def test_rewards_of_agents_with_a_wrong_shape_are_an_error(shape):
    env = duo()
    wrong = env._replace(step=lambda *args: env.step(*args)._replace(reward=jnp.zeros(shape)))
    message = rf"step returned reward of shape {re.escape(str(shape))}; it must be \(2,\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(make_anakin(wrong, config_of(num_envs=4), total_steps=40).train, jax.random.key(0))


@functools.cache
def learning(active):
    """Returns a state, a rollout of random numbers in which some rows are inactive, and the update."""
    config = config_of(num_envs=4, num_steps=8, normalize_obs=True, normalize_reward=True)
    env = duo()
    policy = make_policy(make_network(config, env.obs_spec, env.action_spec), env.obs_spec, env.action_spec)
    learner = make_learner(policy, config)
    rng = np.random.default_rng(0)
    shape = (8, 4)
    mask = rng.random(shape) < 0.7
    ends = ~mask | (rng.random(shape) < 0.1)
    ends[:-1] |= ~mask[1:]  # an agent ends before it becomes inactive
    rollout = Transition(
        obs=jnp.asarray(rng.normal(1.0, 2.0, (*shape, 2)), jnp.float32),
        action=jnp.asarray(rng.integers(2, size=shape), jnp.int32),
        log_prob=jnp.asarray(rng.normal(-0.7, 0.1, shape), jnp.float32),
        value=jnp.asarray(rng.normal(size=shape), jnp.float32),
        next_value=jnp.asarray(rng.normal(size=shape), jnp.float32),
        reward=jnp.asarray(rng.normal(size=shape), jnp.float32),
        terminated=jnp.asarray(ends),
        truncated=jnp.zeros(shape, bool),
        active=jnp.asarray(mask) if active else (),
    )
    hyperparams = jppo.Hyperparams(learning_rate=1e-2, adam_eps=1e-3)
    state = jax.jit(learner.init)(jax.random.key(0), rollout.obs[0], hyperparams, 10)

    def update(state, rollout):
        episodes = Episode(returns=rollout.reward, lengths=rollout.reward, discounted=rollout.reward)
        return learner.update(state, rollout, episode_stats(episodes, rollout.done, rollout.active))

    return state, rollout, jax.jit(update), (policy, config)


def spoil(rollout, where):
    """Returns a rollout with other numbers where [T, N]."""
    change = {"obs": 90.0, "log_prob": -3.0, "value": 50.0, "next_value": 20.0, "reward": 70.0}
    changed = {
        name: jnp.where(where[..., None] if name == "obs" else where, number, getattr(rollout, name))
        for name, number in change.items()
    }
    return rollout.replace(**changed, action=jnp.where(where, 1 - rollout.action, rollout.action))


def test_inactive_rows_do_not_change_the_update():
    state, rollout, update, _ = learning(True)
    after, metrics = update(state, rollout)
    again, same = update(state, spoil(rollout, ~rollout.active))
    jax.tree.map(np.testing.assert_array_equal, (after.policy_state, metrics), (again.policy_state, same))
    np.testing.assert_array_equal(after.reward_stats.mean, again.reward_stats.mean)
    other, _ = update(state, spoil(rollout, rollout.active & (jnp.arange(4) == 1)[None]))
    assert any(
        (a != b).any()
        for a, b in zip(jax.tree.leaves(after.policy_state), jax.tree.leaves(other.policy_state), strict=True)
    )


def test_the_gradient_of_an_inactive_row_is_zero():
    state, rollout, _, (policy, config) = learning(True)
    weight = jnp.array([2.0, 0.0, 2.0, 0.0])

    def loss(obs):
        batch = Batch(
            obs=obs,
            action=rollout.action[0],
            log_prob=rollout.log_prob[0],
            value=rollout.value[0],
            advantage=rollout.reward[0],
            target=rollout.next_value[0],
            weight=weight,
        )
        apply = lambda obs: policy.step(state.policy_state, obs)[:2]  # noqa: E731
        return ppo_loss(apply, batch, jppo.Hyperparams(learning_rate=1e-2), config, None)[0]

    gradient = np.asarray(jax.jit(jax.grad(loss))(rollout.obs[0]))
    assert (gradient[[1, 3]] == 0.0).all()
    assert np.abs(gradient[[0, 2]]).max() > 1e-3


def test_an_update_with_active_rows_only_is_that_of_single_agents():
    state, rollout, update, _ = learning(True)
    single = learning(False)[2]
    everyone = update(state, rollout.replace(active=jnp.ones_like(rollout.active)))
    alone = single(state, rollout.replace(active=()))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, (everyone[0].policy_state, everyone[1]), (alone[0].policy_state, alone[1]))


def test_weights_of_few_active_rows_on_many_devices():
    """The mean over all samples with these weights is the mean over active ones."""
    weights = jax.vmap(functools.partial(_weights, axis_name="d"), axis_name="d")
    active = np.zeros((8, 4), bool)
    assert not np.asarray(weights(active)).any()
    active[3, 1] = True
    np.testing.assert_array_equal(weights(active), 32.0 * active)


@pytest.mark.slow
def test_devices_share_the_mean_over_active_rows():
    """Each device has another number of active rows."""
    state, rollout, update, (policy, config) = learning(True)
    rollout = rollout.replace(active=rollout.active.at[:, 2:].set(False))
    learner = make_learner(policy, config, axis_name="d")

    def shard(state, rollout):
        episodes = Episode(returns=rollout.reward, lengths=rollout.reward, discounted=rollout.reward)
        return learner.update(state, rollout, episode_stats(episodes, rollout.done, rollout.active))

    split, whole = PartitionSpec(None, "d"), PartitionSpec()
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    program = jax.shard_map(shard, mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)
    expected, metrics = update(state, rollout)
    after, same = jax.jit(program)(state, rollout)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, (after.policy_state, same), (expected.policy_state, metrics))


@pytest.mark.slow
@pytest.mark.parametrize("env", [Team, Masked, duo()], ids=["host", "masks", "device"])
def test_train_and_evaluate(env):
    options = {} if env.__class__.__name__ == "Environment" else {"num_actors": 0}
    result = jppo.train(env, config=config_of(), total_steps=120, progress="none", **options)
    assert np.isfinite(result.metrics["loss/total"]).all()
    played = jppo.evaluate(result, num_episodes=6)
    assert played.finished.all()
    assert sorted(played.lengths.tolist()) == ([2, 2, 4, 4, 5, 5] if options else [2, 2, 2, 5, 5, 5])


@pytest.mark.slow
def test_a_played_episode_is_that_of_the_agents_in_its_first_step():
    made = []

    class Drawn(Team):
        render_mode = "rgb_array"

        def __init__(self):
            super().__init__()
            made.append(self)

        def render(self):
            return np.zeros((8, 8, 3), np.uint8)

    result = jppo.train(Drawn, config=config_of(), num_actors=0, total_steps=60, progress="none")
    played = play_gif(result.agent.env, result.policy, seed=7)
    assert played[1:] == (LIMIT, np.mean([0 + 1, sum(10 + t for t in range(LIMIT))]), True)
    assert made[-1].seed == 7


REFUSED = {
    "spaces": (Uneven, "the agents a and b have different observation spaces, Box.* one policy for all agents needs"),
    "no agents": (type("Empty", (Team,), {"possible_agents": ()}), "possible_agents is empty"),
}


@pytest.mark.parametrize("case", REFUSED.items(), ids=lambda case: case[0])
def test_unsuitable_environments_are_refused(case):
    env, message = case[1]
    with pytest.raises(ValueError, match=message):
        make_host_env(env)


@pytest.mark.parametrize(
    ("env", "message"),
    [(Immortal, "a terminated or was truncated, but is still in agents"), (Vanishing, "left agents without being")],
)
def test_agents_that_do_not_follow_the_api_are_named(env, message):
    envs = make_host_env(env).make([0, 0, 0])
    envs.reset()
    steps = (envs.step(np.zeros(3, np.int32)) for _ in range(2))
    with pytest.raises(BrokenContractError, match=message):
        list(steps)


def test_a_type_error_of_an_environment_is_raised_unchanged():
    class Faulty(Masked):
        def reset(self, seed=None, options=None):
            raise TypeError("a mistake in reset")

    with pytest.raises(TypeError, match=r"^a mistake in reset$"):
        jppo.make_host_env(Faulty)


def test_numbers_of_environments_must_be_multiples_of_the_agents():
    with pytest.raises(
        ValueError, match=r"^num_envs = 4 counts agents and must be a multiple of the 3 agents .* 3 or 6"
    ):
        jppo.train(Team, config=config_of(num_envs=4), num_actors=0)
    with pytest.raises(ValueError, match=r"^duo: num_envs = 5 counts agents .* 4 or 6$"):
        make_anakin(duo(), config_of(num_envs=5))
    with pytest.raises(ValueError, match="staggered_start = 5 needs an environment with one agent"):
        make_anakin(duo(), config_of(num_envs=4, staggered_start=5))
    with pytest.raises(ValueError, match="num_devices = 4 does not divide the 2 environments"):
        make_anakin(duo(), config_of(num_envs=4), num_devices=4)
    with pytest.raises(ValueError, match="num_actors = 6 splits environments with 3 agents"):
        spread_envs(config_of(num_envs=12), RayConfig(num_actors=6), 2, True, 1, 3)
    assert spread_envs(config_of(num_envs=12), RayConfig(), 8, True, 1, 3)[1].num_actors == 4


def play_jaxmarl(env, num_steps, seed=0):
    """Steps one environment with random legal actions. Returns the first observation, the states, and the steps."""
    obs, state = jax.jit(env.reset)(jax.random.key(seed))
    step, rng, states, steps, first = jax.jit(env.step), np.random.default_rng(seed), [], [], obs
    for t in range(num_steps):
        mask = obs["action_mask"] if isinstance(obs, dict) else np.ones((env.num_agents, env.action_spec.num_actions))
        action = jnp.asarray([rng.choice(np.flatnonzero(row)) for row in np.asarray(mask)], jnp.int32)
        states.append(state)
        steps.append(step(jax.random.fold_in(jax.random.key(seed), t), state, action))
        obs, state = steps[-1].obs, steps[-1].state
    return first, states, steps


class Declared:
    """An environment with JaxMARL's API, of which an observation is returned and another space may be declared."""

    agents, max_steps = ("a", "b"), 5

    def __init__(self, space, obs):
        self.space, self.obs = space, jnp.asarray(obs)

    def observation_space(self, agent):
        return self.space

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, key):
        return dict.fromkeys(self.agents, self.obs), jnp.int32(0)

    def step_env(self, key, state, actions):
        zeros = dict.fromkeys(self.agents, jnp.float32(0))
        return *self.reset(key), zeros, dict.fromkeys((*self.agents, "__all__"), jnp.bool_(False)), {}

    def get_avail_actions(self, state):
        return dict.fromkeys(self.agents, jnp.ones(2))


@pytest.mark.parametrize(
    ("space", "obs", "features"),
    [
        (spaces.Discrete(3), 2, [0, 0, 1]),
        (types.SimpleNamespace(num_categories=jnp.array([2, 3]), shape=(2,)), [1, 0], [0, 1, 1, 0, 0]),
        (spaces.Discrete(2), [1, 0, 1], [1, 0, 1]),  # declared so by Hanabi
        (spaces.Box(-9, 9, (2,), np.int32), [-9, 4], [-9, 4]),
    ],
    ids=["Discrete", "MultiDiscrete", "flags", "integers"],
)
def test_spaces_of_jaxmarl_mean_the_same_as_others(monkeypatch, space, obs, features):
    stub = types.ModuleType("jaxmarl")
    stub.make = lambda name, **options: Declared(space, obs)
    monkeypatch.setitem(sys.modules, "jaxmarl", stub)
    monkeypatch.delitem(sys.modules, "jppo.envs.families.jaxmarl", raising=False)
    env = importlib.import_module("jppo.envs.families.jaxmarl").make("declared")
    del sys.modules["jppo.envs.families.jaxmarl"]
    seen, _ = env.reset(jax.random.key(0))
    prepared = prepare_obs(env.obs_spec, seen)
    np.testing.assert_array_equal(prepared["observation"], [features] * 2)
    assert env.obs_spec["action_mask"] == ObsSpec((2,), "bool")


def test_the_limit_of_jaxmarl_truncates():
    pytest.importorskip("jaxmarl")
    with lenient():
        env = jppo.make_env("jaxmarl:MPE_simple_spread_v3")
        assert (env.num_agents, env.obs_spec.shape) == (3, (18,))
        _, _, steps = play_jaxmarl(env, 51)
    for t, step in enumerate(steps, start=1):
        assert not step.terminated.any()
        assert (step.truncated == (t % 25 == 0)).all()
        assert step.active.all()
        assert ((step.obs == step.final_obs).all()) == (t % 25 != 0)


def test_unknown_options_of_jaxmarl_are_refused():
    pytest.importorskip("jaxmarl")
    with lenient():
        with pytest.raises(
            ValueError, match=r"^jaxmarl:MPE_simple_spread_v3 has no option agent_number; it has .*num_agents"
        ):
            jppo.make_env("jaxmarl:MPE_simple_spread_v3", agent_number=5)
        assert jppo.make_env("jaxmarl:MPE_simple_spread_v3", num_agents=5).num_agents == 5


@pytest.mark.filterwarnings("ignore")  # of JaxMARL
def test_scenarios_and_layouts_of_jaxmarl_have_names():
    pytest.importorskip("jaxmarl")
    with lenient():
        assert jppo.make_env("jaxmarl:HeuristicEnemySMAX", scenario="3m").num_agents == 3
        ring = jppo.make_env("jaxmarl:overcooked", layout="coord_ring")
        assert ring.obs_spec.shape != jppo.make_env("jaxmarl:overcooked").obs_spec.shape
        with pytest.raises(ValueError, match=r"^jaxmarl:overcooked has no layout 'ring'; choose from .*coord_ring"):
            jppo.make_env("jaxmarl:overcooked", layout="ring")


@pytest.mark.parametrize("limit", [10, 60])
def test_dead_units_of_smax_get_the_rewards_of_their_team(limit):
    """JaxMARL rewards them until the battle ends."""
    pytest.importorskip("jaxmarl")
    with lenient():
        env = jppo.make_env("jaxmarl:HeuristicEnemySMAX", max_steps_in_episode=limit)
        _, states, steps = play_jaxmarl(env, 150)
    ends, truncations, dead_rewards = 0, 0, 0.0
    for state, step in zip(states, steps, strict=True):
        dead = ~np.asarray(state.env_state.state.unit_alive[:5])
        over = int(step.state.time) == 0
        assert step.active.all()
        assert (step.terminated == step.terminated[0]).all()
        assert (step.truncated == (over and int(state.time) == limit - 1 and not step.terminated[0])).all()
        assert (step.terminated | step.truncated).all() == over
        assert (step.reward == step.reward[0]).all()
        if dead.any():
            dead_rewards += float(step.reward[dead].sum())
        now_dead = ~np.asarray(step.state.env_state.state.unit_alive[:5])
        assert (np.asarray(step.obs["action_mask"]).sum(1)[now_dead] == 1).all()
        ends, truncations = ends + over, truncations + bool(step.truncated[0])
    assert ends >= 2
    assert (truncations >= 10) == (limit == 10)
    assert dead_rewards > 0.0


@pytest.mark.filterwarnings("ignore")  # of JaxMARL
def test_agents_of_jaxmarl_that_ended_are_inactive_until_the_episode_ends():
    pytest.importorskip("jaxmarl")
    with lenient():
        options = {"num_agents": 6, "act_type": "Discrete", "evaporating": True, "goal_radius": 2.0}
        env = jppo.make_env("jaxmarl:jaxnav", max_steps_in_episode=60, **options)
        _, states, steps = play_jaxmarl(env, 150)
    active, early_ends, ends = np.ones(6, bool), 0, 0
    for state, step in zip(states, steps, strict=True):
        assert np.asarray(step.terminated)[~active].all()
        assert not np.asarray(step.reward)[~active].any()
        assert not np.asarray(step.truncated)[~active].any()
        done = np.asarray(step.terminated | step.truncated)
        over = int(step.state.time) == 0
        assert step.truncated.any() == (over and int(state.time) == 59 and (active & ~step.terminated).any())
        early_ends, ends = early_ends + int((done & active).sum() * (not over)), ends + over
        active = np.ones(6, bool) if over else active & ~done
        np.testing.assert_array_equal(step.active, active)
    assert ends >= 2
    assert early_ends >= 3


@pytest.mark.parametrize("last", ["NOTHING", "TELL"])
def test_an_end_of_jaxmarl_in_the_step_of_the_limit_is_no_truncation(last):
    pytest.importorskip("jaxmarl")
    with lenient():
        env = jppo.make_env("jaxmarl:switch_riddle")  # 3 agents; a TELL ends the episode
        _, state = env.reset(jax.random.key(0))
        for t in range(6):
            assert int(state.time) == t
            action = env.source.game_actions["NOTHING" if t < 5 else last]
            step = env.step(jax.random.key(t), state, jnp.full(3, action))
            state = step.state
    assert step.terminated.all() == (last == "TELL")
    assert step.truncated.all() == (last == "NOTHING")
    assert int(state.time) == 0


@pytest.mark.parametrize("name", ["HeuristicEnemySMAX", "jaxnav"])
@pytest.mark.filterwarnings("ignore")  # of JaxMARL
def test_drawings_of_jaxmarl(name):
    pytest.importorskip("jaxmarl")
    with lenient():
        env = jppo.make_env(f"jaxmarl:{name}")
        state = env.reset(jax.random.key(0))[1]
        first, step = env.render(state), jax.jit(env.step)
        for t in range(4):
            action = jnp.ones((env.num_agents, *env.action_spec.shape), env.action_spec.dtype)
            state = step(jax.random.key(t), state, action).state
        second = env.render(state)
    assert first.shape == second.shape
    assert (first.dtype, first.shape[2]) == (np.uint8, 3)
    assert (first != second).any()


def test_an_episode_of_jaxmarl_is_drawn_until_its_limit():
    pytest.importorskip("jaxmarl")
    with lenient():
        env = jppo.make_env("jaxmarl:jaxnav", max_steps_in_episode=6)
        result = jppo.train(env, total_steps=60, config=config_of(num_envs=env.num_agents))
        played = play_gif(env, result.policy)
    assert (played.length, played.finished) == (6, True)


def test_jppo_does_not_draw_the_riddles_of_jaxmarl():
    pytest.importorskip("jaxmarl")
    with (
        lenient(),
        pytest.raises(ValueError, match=r"^jaxmarl:switch_riddle cannot be drawn: it has no render function"),
    ):
        check_drawable(jppo.make_env("jaxmarl:switch_riddle"))


def test_the_prey_of_facmac_is_no_agent():
    """JaxMARL moves it and ignores its actions."""
    pytest.importorskip("jaxmarl")
    with lenient():
        env = jppo.make_env("jaxmarl:MPE_simple_facmac_v1")
        state = env.reset(jax.random.key(0))[1]
        step = jax.jit(env.step)
        still = step(jax.random.key(1), state, jnp.zeros((3, 5)))
        for agent in range(3):
            moved = step(jax.random.key(1), state, jnp.zeros((3, 5)).at[agent, 1].set(1.0))
            assert not np.array_equal(moved.obs[agent], still.obs[agent])
    assert env.num_agents == 3


def test_agents_of_jaxmarl_need_equal_spaces():
    pytest.importorskip("jaxmarl")
    with pytest.raises(ValueError, match="the agents adversary_0 and agent_0 have different observation spaces"):
        jppo.make_env("jaxmarl:MPE_simple_tag_v3")


@pytest.mark.parametrize("name", ["mpe/simple_spread_v3", "butterfly/knights_archers_zombies-v11"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pettingzoo(name):
    """In the second environment, agents die, and all end at a limit or when the game is lost."""
    pytest.importorskip("pettingzoo")
    env = make_host_env(f"pettingzoo:{name}")
    assert f"pettingzoo:{name}" in host_env_names()
    envs, rng = env.make(list(range(2 * env.num_agents))), np.random.default_rng(0)
    envs.reset()
    before, ends = envs.active.copy(), 0
    assert before.all()
    for t in range(1, 301):
        after = envs.step(rng.integers(env.action_spec.num_actions, size=len(before)))
        done = after.terminated | after.truncated
        assert done[~before].all()
        assert not after.reward[~before].any()
        assert set(after.final_obs) == set(np.flatnonzero(done & before))
        if name.startswith("mpe"):
            assert (after.truncated == (t % 25 == 0)).all()
        before, ends = envs.active.copy(), ends + int((done & before).sum())
    envs.close()
    assert ends >= 8
    with pytest.raises(ValueError, match="the agents adversary_0 and agent_0 have different observation spaces"):
        make_host_env("pettingzoo:mpe/simple_tag_v3")


def test_check_env_checks_the_rows_of_agents():
    report = jppo.check_env(Team, steps=32, num_envs=2)
    assert report.passed, report.failed
    assert report["runs"].seen == "384 steps, 76 episodes"
    assert report["time_limit"].seen == "agent 0: every episode terminates after 2 steps"
    assert report["seeds"].seen == "2 seeds with the same actions give the same 32 steps"
    seen = "3 of 3 agents, for example agent 0: 14 final observations belong to the episode that ended"
    assert report["final_obs"].seen == seen


def test_check_env_reports_a_reset_that_raises():
    class Stuck(Team):
        def reset(self, seed=None, options=None):
            raise ValueError("no map")

    report = jppo.check_env(Stuck, steps=32, num_envs=2)
    assert report.failed == ("runs",)
    assert report["runs"].seen == "making or resetting it raised ValueError: no map"
    assert "in reset" in report["runs"].traceback


def test_check_env_checks_the_agents_of_device_environments():
    report = jppo.check_env(duo(), steps=32, num_envs=4)
    found = {check.name: check.status for check in report.checks if check.status not in ("pass", "skipped")}
    assert found == {"seeds": "warn", "time_limit": "warn"}  # it has no random numbers
    assert report["time_limit"].seen == "agent 0: every episode terminates after 2 steps"
    seen = "2 of 2 agents, for example agent 0: 28 final observations belong to the episode that ended"
    assert report["final_obs"].seen == seen
    assert "8 agents in one program" in report["speed"].seen


@pytest.mark.parametrize(
    ("change", "name", "seen"),
    [
        (lambda after: {"reward": after.reward[0]}, "contract", "reward is float32[], not float32[2]"),
        (lambda after: {"active": ()}, "contract", "active is (), not bool[2]"),
        (
            lambda after: {"reward": after.reward + 1.0},
            "contract",
            "at step 2 of environment 0, agent 0 does not take part, but has a reward",
        ),
        (
            lambda after: {"terminated": after.terminated & (after.final_obs[:, 1] == 2)},
            "contract",
            "agent 0 does not take part, but has terminated = False",
        ),
        (
            lambda after: {"terminated": after.terminated & (after.final_obs[:, 1] > 2)},
            "contract",
            "after step 1 of environment 0, agent 0 no longer takes part, but has not ended",
        ),
        (
            lambda after: {"active": after.active & (after.obs[:, 1] > 0)},
            "contract",
            "after step 4 of environment 0, agent 0 does not take part, although all agents ended",
        ),
        (
            lambda after: {
                name: getattr(after, name).at[1].add(jnp.where(after.state == 4, jnp.nan, 0.0))
                for name in ("obs", "final_obs")
            },
            "finite",
            "observation has nan",
        ),
        (lambda after: {"final_obs": after.obs}, "final_obs", "agent 1: is in the region of starts at all 24 ends"),
        (
            lambda after: {"final_obs": after.final_obs.at[1].set(after.obs[1])},
            "final_obs",
            "agent 1: is in the region of starts at all 24 ends",
        ),
        (
            lambda after: {"reward": after.reward.at[1].set(jnp.where(after.state == 4, jnp.nan, after.reward[1]))},
            "finite",
            "agent 1: reward nan at step 3 of environment 0",
        ),
        (lambda after: {"obs": after.obs[:1]}, "contract", "observations: float32[2, 2] after reset, float32[1, 2]"),
    ],
)
def test_check_env_reports_faults_of_agents(change, name, seen):
    env = duo()

    def step(key, state, action):
        after = env.step(key, state, action)
        return after._replace(**change(after))

    report = jppo.check_env(env._replace(step=step), steps=32, num_envs=4)
    assert report.failed == (name,)
    assert seen in report[name].seen


@pytest.mark.parametrize(
    ("broken", "name", "seen"),
    [
        (lambda self, returned: returned[:4], "contract", "step returned 4 values (dict, dict, dict, dict)"),
        (
            lambda self, returned: ({}, *returned[1:]),
            "contract",
            "step returned no observation, reward or flag of the agent a",
        ),
        (
            lambda self, returned: ({agent: np.zeros(4) for agent in returned[0]}, *returned[1:]),
            "spaces",
            "an observation does not fit Box(-inf, inf, (3,), float32)",
        ),
    ],
)
def test_check_env_reports_faults_of_parallel_environments(broken, name, seen):
    class Broken(Team):
        def step(self, actions):
            return broken(self, super().step(actions))

    report = jppo.check_env(Broken, steps=32, num_envs=2)
    assert report.failed == (name,)
    assert seen in report[name].seen


def test_check_env_judges_agents_that_come_late_and_end_with_their_environment():
    class Late(Team):
        """Agent "a" comes after step 1 and stays; "b" ends at step 2."""

        def reset(self, seed=None, options=None):
            self.episode, self.time, self.agents = self.episode + 1, 0, ["b", "c"]
            return self.see(), {}

        def step(self, actions):
            before, self.time = self.agents, self.time + 1
            ends = {agent: agent == "b" and self.time == 2 for agent in before}
            cuts = dict.fromkeys(before, self.time == LIMIT)
            seen = self.see()
            self.agents = [agent for agent in before if not (ends[agent] or cuts[agent])]
            if self.time == 1:
                self.agents = ["a", *self.agents]
                seen = self.see()
            return seen, dict.fromkeys(before, 1.0), ends, cuts, {}

    report = jppo.check_env(Late, steps=32, num_envs=2)
    assert report["final_obs"].status == "pass"
    assert report["final_obs"].seen.startswith("3 of 3 agents")
    assert report["time_limit"].seen == "agent 1: every episode terminates after 2 steps"


def test_check_env_counts_agents_that_are_not_judged():
    class Short(Team):
        """Agent "c" never comes."""

        def step(self, actions):
            returned = super().step(actions)
            self.agents = [agent for agent in self.agents if agent != "c"]
            return returned

    report = jppo.check_env(Short, steps=32, num_envs=2)
    assert report["final_obs"].seen.endswith("; 1 of 3 agents not judged")


def test_check_env_finds_lost_final_observations_of_agents_that_end_early():
    env = duo(end=4)

    def step(key, state, action):
        after = env.step(key, state, action)
        early = after.final_obs[:, 1] == 4
        return after._replace(
            final_obs=jnp.where(early[:, None] & after.terminated[:, None], env.reset(key)[0], after.final_obs)
        )

    report = jppo.check_env(env._replace(step=step), steps=64, num_envs=4)
    assert report.failed == ("final_obs",)
    assert report["final_obs"].seen.startswith("agent 0: ")


def test_check_env_needs_the_observations_of_all_agents():
    env = duo()

    def step(key, state, action):
        after = env.step(key, state, action)
        return after._replace(obs=after.obs[:1], final_obs=after.final_obs[:1])

    def reset(key):
        obs, state = env.reset(key)
        return obs[:1], state

    report = jppo.check_env(env._replace(reset=reset, step=step), steps=32, num_envs=4)
    assert report.failed == ("spaces",)
    assert report["spaces"].seen == "the observation of 2 agents has the shape [1, 2], not [2, 2]"


def test_check_env_warns_of_agents_that_stay_active():
    env = duo()

    def step(key, state, action):
        return env.step(key, state, action)._replace(active=jnp.ones(2, bool))

    report = jppo.check_env(env._replace(step=step), steps=32, num_envs=4)
    assert report["contract"].status == "warn"
    assert "at step 1 of environment 0, agent 0 ends and takes part in the next step" in report["contract"].seen


def test_check_env_accepts_agents_that_see_only_their_number():
    """The first observation of an episode equals the last one."""

    def reset(key):
        return jnp.eye(2), jnp.zeros((), jnp.int32)

    def step(key, time, action):
        over = time == LIMIT - 1
        return Step(
            obs=jnp.eye(2),
            state=jnp.where(over, 0, time + 1),
            reward=(action == action[::-1]).astype(jnp.float32),
            terminated=jnp.zeros(2, bool),
            truncated=jnp.broadcast_to(over, 2),
            final_obs=jnp.eye(2),
            active=jnp.ones(2, bool),
        )

    report = jppo.check_env(duo()._replace(reset=reset, step=step), steps=32, num_envs=4)
    assert report.passed, report.failed
    assert report["final_obs"].status == "pass"
