"""Tests `learner=`, which replaces the whole update."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from probes import Counting

import jppo

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from advantages_per_epoch import advantages_per_epoch

CONFIG = jppo.PPOConfig(num_envs=4, num_steps=8, num_minibatches=2, hidden_sizes=(4,), keep_next_obs=True)


def params_after(config, **options):
    agent = jppo.make_anakin(Counting(), config, total_steps=96, **options)
    state, metrics = jax.jit(agent.train)(jax.random.key(0))
    return state.train, metrics


def test_one_epoch_of_new_advantages_is_jppos_update():
    config = CONFIG.replace(num_epochs=1)
    ours, metrics = params_after(config)
    theirs, other_metrics = params_after(config, learner=advantages_per_epoch)
    assert set(metrics) == set(other_metrics)
    assert int(theirs.update) == 3
    for a, b in zip(jax.tree.leaves(ours.policy_state), jax.tree.leaves(theirs.policy_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_new_advantages_differ_in_later_epochs():
    ours, _ = params_after(CONFIG)
    theirs, _ = params_after(CONFIG, learner=advantages_per_epoch)
    differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours.policy_state, theirs.policy_state)
    assert max(jax.tree.leaves(differences)) > 1e-5


@pytest.mark.parametrize("actors", [{}, {"backend": "ray", "num_actors": 0}])
def test_a_run_names_its_own_learner(tmp_path, actors):
    """In both modes. Its config.json says that the learner is not jppo's."""
    calls = []

    def learner(policy, config, axis_name):
        calls.append(axis_name)
        return jppo.make_learner(policy, config, axis_name=axis_name)

    env = "CartPole-v1" if actors else Counting()
    result = jppo.train(env, config=CONFIG, total_steps=64, learner=learner, run_dir=tmp_path, num_devices=1, **actors)
    assert result.summary["updates"] == 2
    assert set(calls) == {None}
    assert json.loads((tmp_path / "config.json").read_text())["learner"] == "custom"


def test_statistics_advance_once_per_rollout():
    config = CONFIG.replace(num_epochs=3, normalize_obs=True, normalize_reward=True)
    state, _ = params_after(config, learner=advantages_per_epoch)
    for stats in (state.reward_stats, state.policy_state.obs_stats):
        assert float(stats.count) == 3 * config.batch_size


@pytest.mark.parametrize("field", [{"kl_control": "stop"}, {"recurrent": "gru"}])
def test_the_example_refuses_what_it_does_not_support(field):
    with pytest.raises(ValueError, match="advantages_per_epoch needs a feed-forward network"):
        jppo.make_anakin(Counting(), CONFIG.replace(**field), learner=advantages_per_epoch)


def with_update(change):
    """Returns a learner with another result of `update`."""

    def learner(policy, config, axis_name):
        made = jppo.make_learner(policy, config, axis_name=axis_name)
        return made._replace(update=lambda *arguments: change(*made.update(*arguments)))

    return learner


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (lambda policy, config, axis_name: None, "learner returned NoneType; it must return a jppo.Learner"),
        ("advantages", "learner = 'advantages' must be a function of"),
        (with_update(lambda state, metrics: state), "the learner's update returned TrainState; it must return"),
        (with_update(lambda state, metrics: (state.replace(loss_state=1.0), metrics)), "must keep shapes and dtypes"),
        (with_update(lambda state, metrics: (state, {})), 'among them "finite"'),
        (with_update(lambda state, metrics: (state, metrics | {"x": metrics["finite"][None]})), "a dict of scalars"),
    ],
)
def test_wrong_learners_are_refused(learner, message):
    with pytest.raises(jppo.errors.Refused, match=message):
        jppo.make_anakin(Counting(), CONFIG, learner=learner)


@pytest.mark.parametrize("own", ["loss", "advantages", "optimizer"])
def test_a_learner_replaces_the_parts_of_jppos(own):
    part = {"loss": jppo.ppo_loss, "advantages": jppo.gae_advantages, "optimizer": lambda h: None}[own]
    with pytest.raises(jppo.errors.Refused, match="learner replaces optimizer, loss and advantages"):
        jppo.make_anakin(Counting(), CONFIG, learner=advantages_per_epoch, **{own: part})
