"""Tests `scale_envs`, which multiplies environments and minibatches, and the staggered start of environments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL, share_chunks
from host_probes import Counting as HostCounting
from lenient import lenient
from probes import Counting, TimeLimit

import jppo
from jppo.cli.main import main, parse_command
from jppo.config.overrides import resolve_settings
from jppo.runs.files import read_json
from jppo.sweeps.grid import check_settings, make_groups
from jppo.sweeps.tune_trial import apply_space
from jppo.training.settings import RunSettings, prepare_run

BASE = SMALL(num_minibatches=2, num_epochs=1)
PRESET = jppo.PRESETS["cleanrl-classic"]


def test_scale_envs_keeps_the_minibatch_size():
    scaled = BASE.scale_envs(3)
    assert (scaled.num_envs, scaled.num_minibatches) == (12, 6)
    assert scaled.minibatch_size == BASE.minibatch_size
    assert scaled.replace(num_envs=4, num_minibatches=2) == BASE


def test_scale_envs_is_a_setting_like_others():
    config, hyperparams = resolve_settings(PRESET, None, None, {"scale_envs": 4, "num_steps": 64})
    assert config == PRESET.config.replace(num_steps=64).scale_envs(4)
    assert hyperparams == PRESET.hyperparams
    settings = RunSettings(env=TimeLimit(), config=BASE)
    assert prepare_run(apply_space({"scale_envs": 2}, settings)).agent.config == BASE.scale_envs(2)
    groups = make_groups(settings, seeds=[0], values=check_settings({"scale_envs": [1, 2]}))
    assert [group.agent.config for group in groups] == [BASE, BASE.scale_envs(2)]
    assert [group.runs[0].settings for group in groups] == [{"scale_envs": 1}, {"scale_envs": 2}]


@pytest.mark.parametrize("name", ["num_envs", "num_minibatches"])
def test_scale_envs_contradicts_the_fields_that_it_multiplies(name):
    message = f"scale_envs = 4 multiplies .* leave out {name} or scale_envs"
    with pytest.raises(ValueError, match=message):
        jppo.train(TimeLimit(), scale_envs=4, **{name: 8})
    for command in ("train", "bench"):
        with pytest.raises(ValueError, match=message):
            parse_command([command, "CartPole-v1", "--scale-envs", "4", f"--{name.replace('_', '-')}", "8"])


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_invalid_factors_raise(value):
    with pytest.raises(ValueError, match=f"scale_envs = {value!r} must be a whole number of at least 1"):
        jppo.train(TimeLimit(), scale_envs=value)


def test_scale_envs_is_no_field():
    with pytest.raises(TypeError, match=r"no field 'scale_envs'; use PPOConfig\(...\).scale_envs\(...\)"):
        jppo.PPOConfig(scale_envs=4)
    with pytest.raises(ValueError, match="no field 'scale_envs'; pass it beside config"):
        jppo.train(TimeLimit(), config={"scale_envs": 4})


@pytest.mark.slow
def test_scaled_runs_are_resumed_with_and_without_the_factor(tmp_path, monkeypatch):
    """The factor is applied once, not again at each resume."""
    share_chunks(monkeypatch)
    arguments = {"config": BASE, "scale_envs": 2, "total_steps": 128, "learning_rate": 1e-3, "num_devices": 1}
    jppo.train(TimeLimit(), run_dir=tmp_path, **arguments)
    for total_steps, again in ((192, arguments), (256, {}), (320, {"num_envs": 8})):
        result = jppo.train(TimeLimit(), run_dir=tmp_path, **(again | {"total_steps": total_steps}))
        assert result.agent.config == BASE.scale_envs(2)
        assert result.summary["steps"] == total_steps
    assert "scale_envs" not in read_json(tmp_path / "config.json")  # num_envs replaced it
    with pytest.raises(ValueError, match="num_envs is 8 in the run, but 16 now"):
        jppo.train(TimeLimit(), run_dir=tmp_path, config=BASE, scale_envs=4)


@pytest.mark.slow
def test_command_line_resumes_scaled_runs(tmp_path):
    words = ["train", "CartPole-v1", "--run-dir", str(tmp_path), "--quiet", "--num-devices", "1", "--num-steps", "8"]
    words += ["--scale-envs", "2", "--hidden-sizes", "4", "--learning-rate", "1e-3", "--total-steps"]
    with lenient():
        assert main([*words, "128"]) == 0
    saved = read_json(tmp_path / "config.json")
    assert (saved["config"]["num_envs"], saved["config"]["num_minibatches"], saved["scale_envs"]) == (8, 8, 2)
    for again in ([*words, "192"], ["train", "CartPole-v1", "--resume", str(tmp_path)]):
        command = parse_command(again)
        assert (command.config.num_envs, command.config.num_minibatches, command.scale_envs) == (4, 4, 2)
        assert resolve_settings(PRESET, command.config, None, {"scale_envs": 2})[0] == jppo.PPOConfig(**saved["config"])


def staggered(env, num_envs, oldest, **options):
    """Returns the agent and its initial state."""
    config = SMALL(num_envs=num_envs, staggered_start=oldest, num_minibatches=1, num_epochs=1, **options)
    agent = jppo.make_anakin(env, config, total_steps=2 * config.batch_size)
    return agent, jax.jit(agent.init)(jax.random.key(0))


class Long(TimeLimit):
    """TimeLimit with 16 steps."""

    limit = 16


@pytest.mark.slow
def test_environments_start_at_different_ages():
    agent, state = staggered(Long(), 8, 16)
    ages = [0, 2, 4, 6, 8, 10, 12, 14]
    np.testing.assert_array_equal(state.collect.env_state.time, ages)
    np.testing.assert_array_equal(state.collect.episode.lengths, ages)
    np.testing.assert_array_equal(state.collect.episode.returns, ages)
    state, metrics = jax.jit(agent.step)(state)  # 8 steps: the older half ends
    assert metrics["episode/count"] == 4
    assert metrics["episode/length_mean"] == metrics["episode/return_mean"] == 16
    _, metrics = jax.jit(agent.step)(state)
    assert metrics["episode/count"] == 4


@pytest.mark.slow
def test_synchronized_environments_end_together():
    """The artefact that the staggered start removes."""
    agent, state = staggered(Long(), 8, 0)
    counts = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.step(s), state, length=2)[1])(state)
    np.testing.assert_array_equal(counts["episode/count"], [0, 8])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recurrent": "gru", "recurrent_size": 4}], ids=["mlp", "gru"])
def test_an_environment_of_age_zero_is_not_stepped(options):
    _, plain = staggered(Counting(), 4, 0, **options)
    _, state = staggered(Counting(), 4, 8, **options)

    def data(tree, row):
        return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)[row]
                for x in jax.tree.leaves(tree)]  # fmt: skip

    for old, new in zip(data(plain.collect, 0), data(state.collect, 0), strict=True):
        np.testing.assert_array_equal(old, new)
    assert any((old != new).any() for old, new in zip(data(plain.collect, 3), data(state.collect, 3), strict=True))
    chex_equal = zip(jax.tree.leaves(plain.train.policy_state), jax.tree.leaves(state.train.policy_state), strict=True)
    assert all((old == new).all() for old, new in chex_equal)
    assert (state.collect.episode.lengths < 5).all()  # episodes ended, and the next ones began


def test_host_environments_cannot_start_at_different_ages():
    with pytest.raises(ValueError, match="staggered_start = 8 supports on-device"):
        jppo.train(HostCounting, staggered_start=8, num_envs=4, ray=jppo.RayConfig(num_actors=0))
    with pytest.raises(ValueError, match="staggered_start = -1 must be a whole number from 0 to 1,000,000,000"):
        jppo.PPOConfig(staggered_start=-1)
