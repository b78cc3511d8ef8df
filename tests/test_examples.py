"""Tests that every example is short, runs, and gives the result that it states."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import ray
from lenient import lenient

EXAMPLES = Path(__file__).parent.parent / "examples"


def quickstart(result):
    score, actions = result
    assert score > 200
    assert actions.tolist() == [0, 1], "the actions must push towards the side to which the pole falls"


def solves(metrics):
    assert metrics["return"][-10:].mean() > 475  # the largest return is 500


def balances(score):
    assert score > 100  # a random policy reaches 22


def remembers(score):
    assert score > 0.9  # without memory, the best return is 0


def learns_to_dock(result):
    first, last = result
    assert first < -20
    assert last > -5


def rates_matter(returns):
    assert returns.shape == (3, 2)
    assert len(np.unique(returns[1])) == 2, "seeds do not differ"
    slow, good, _ = returns.mean(axis=1)
    assert slow < 60
    assert good > 120


def sweeps_by_grid_and_by_optuna(best):
    grid, proposed = best
    assert grid.config == {"learning_rate": 1e-2, "num_envs": 4}, "the other learning rate is too low to learn"
    assert 1e-5 <= proposed.config["learning_rate"] <= 1e-2
    for trial in best:
        assert trial.metrics["env_steps"] == 8192
        assert trial.checkpoint


def learns_to_heat(result):
    first, last = result
    assert first < -300
    assert last > -200


def predicts_better(errors):
    first, last = errors
    assert last < 0.5 * first


def both_balance(scores):
    assert min(scores) > 150


def learns_late(score):
    assert score > 100


def only_the_bonus_explores(scores):
    plain, bonus = scores
    assert plain < 0.1
    assert bonus > 0.5


def needs_the_curriculum(returns):
    plain, curriculum = returns
    assert plain < 0.7
    assert curriculum > 0.9


def halves(result):
    assert sorted({run.status for run in result.runs}) == ["finished", "stopped"]
    assert result.best().settings["learning_rate"] >= 1e-3
    assert result.best().score > 60


def sweeps_schedules(result):
    entropy = {str(run.settings["ent_coef"]): run.metrics.get("hyperparams/ent_coef") for run in result.runs}
    assert entropy["0.01"] is None
    np.testing.assert_allclose(entropy["linear(0.1, 0)"], np.linspace(0.1, 0.0, 41)[:-1], rtol=1e-5)


def is_one_run(result):
    config, (one, all_of_them) = result
    assert config.num_envs == 64
    np.testing.assert_allclose(one[:3], all_of_them[:3], rtol=1e-3)
    assert len(one) == len(all_of_them) == 10


def is_as_never_stopped(result):
    whole, resumed = result
    assert resumed.summary["status"] == "finished"
    np.testing.assert_array_equal(resumed.metrics["loss/value"], whole.metrics["loss/value"])


def plans(planned):
    (plan,) = planned
    assert 0 < sum(plan.memory.values()) < plan.memory_free
    assert plan.largest_num_envs > 64


def measures(benched):
    small, large = benched
    assert (small.num_envs, large.num_envs) == (8, 32)
    assert sum(large.shares.values()) > 0.999


def evolves(result):
    assert np.median([run.return_mean for run in result.runs]) > 100
    rates = [run.last_values["learning_rate"] for run in result.runs]
    assert np.median(rates) > 1e-4, "runs with useless learning rates must be replaced"


def is_the_same_in_two_processes(returns):
    ray.shutdown()
    together, alone = returns
    np.testing.assert_allclose(together, alone, rtol=1e-3)


def acts_without_jax(result):
    trained, exported, score = result
    assert trained.tolist() == exported.tolist()
    assert score > 100  # a random policy reaches 22


CLAIMS = {
    "export_a_policy": ({"total_steps": 100_000}, acts_without_jax, "bytes; with NumPy alone it balances for"),
    "several_hosts": ({"total_steps": 32_768}, is_the_same_in_two_processes, "2 processes, 2 devices: "),
    "schedules": ({"total_steps": 20_480, "num_seeds": 1}, sweeps_schedules, "update  learning_rate  clip_eps"),
    "sweep": ({"total_steps": 60_000, "num_seeds": 2}, halves, "learning rate   return   95 % interval"),
    "many_devices": ({"total_steps": 20_480, "num_envs": 64}, is_one_run, "after the first update they differ by"),
    "resume_a_run": ({"total_steps": 40_960}, is_as_never_stopped, "bit-identical policies: True"),
    "plan_a_run": ({"sizes": (8,)}, plans, "environments fit"),
    "bench_a_setting": ({"sizes": (8, 32), "seconds": 0.1}, measures, "steps/s  shares: environment"),
    "population_based_training": ({"total_steps": 60_000, "num_seeds": 2}, evolves, "run   copied at update"),
    "ray_actors": ({"total_steps": 50_000}, learns_to_heat, "steps/s with 2 actors"),
    "one_file_ppo": ({}, solves, "steps   return   entropy"),
    "quickstart": ({}, quickstart, "mean return"),
    "custom_network_linen": ({"total_steps": 100_000}, balances, "a residual network of 9219 parameters"),
    "custom_network_nnx": ({"total_steps": 100_000}, balances, "nnx, torso (4, 64)"),
    "custom_network_equinox": ({"total_steps": 100_000}, balances, "equinox, 2 hidden layers"),
    "custom_recurrent_equinox": ({"total_steps": 100_000}, remembers, "equinox with a GRU: mean return"),
    "custom_environment": ({"total_steps": 200_000}, learns_to_dock, "at first"),
    "ray_tune_sweep": (
        {"total_steps": 8192, "learning_rates": (1e-5, 1e-2), "num_envs": (4,), "num_samples": 1},
        sweeps_by_grid_and_by_optuna,
        "learning rate   batch size   steps   mean return",
    ),
    "simple_policy_optimization": ({}, both_balance, "SPO: mean return"),
    "auxiliary_loss": ({}, predicts_better, "prediction error"),
    "vtrace": ({}, learns_late, "mean return"),
    "advantages_per_epoch": ({}, learns_late, "mean return"),
    "curriculum": ({}, needs_the_curriculum, "with a curriculum:"),
    "random_network_distillation": ({"total_steps": 350_000}, only_the_bonus_explores, "with RND: mean return"),
    "vmapped_seeds": ({"total_steps": 60_000, "num_seeds": 2}, rates_matter, "learning rate   mean return   per seed"),
}


# The other examples are slow tests: they train for long, or other tests cover the same mechanisms.
FAST = ("quickstart",)
# Compile for longer than they train.
SHORT = (
    "bench_a_setting",
    "many_devices",
    "plan_a_run",
    "ray_tune_sweep",
    "resume_a_run",
    "schedules",
    "several_hosts",
    "sweep",
)


def test_every_example_is_tested_and_short():
    """one_file_ppo is a whole program; its own test limits its length."""
    files = {path.stem: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(CLAIMS)
    del files["one_file_ppo"]
    assert max(files.values()) <= 60, files


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray forks and then executes another program
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray Train imports deprecated settings of Ray Data
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CLAIMS])
def test_example(name, request, capsys, monkeypatch, tmp_path):
    if name not in SHORT:
        request.getfixturevalue("optimized")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")  # examples must not connect to the Ray of another test
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments, check, printed = CLAIMS[name]
    with lenient():
        check(module.main(**arguments))
    assert printed in capsys.readouterr().out
