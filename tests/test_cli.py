"""Tests the command line: options, messages and exit codes."""

import contextlib
import dataclasses
import gc
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import probes
import pytest
from lenient import lenient
from PIL import Image
from run_files import write_run
from saved import save_run

import jppo
from jppo import PRESETS
from jppo.cli import main as cli
from jppo.cli import output
from jppo.cli.main import main
from jppo.envs import available, modules
from jppo.envs.backends import choose_backend
from jppo.errors import TrainingDiverged
from jppo.runs.curves import read_groups
from jppo.runs.load import load_run, read_summary
from jppo.runs.run_dir import read_metrics, run_config
from jppo.sweeps import pbt_trainer
from jppo.sweeps.results import SweepResult
from jppo.training import train as driver

DEADLINE = 120  # time limit for other processes in seconds
SMALL = ["--num-envs", "8", "--num-steps", "16", "--hidden-sizes", "8", "--num-minibatches", "2"]
SUMMARY = {
    *("env", "backend", "status", "steps", "updates", "seconds", "compile_seconds", "steps_per_second", "episodes"),
    *("return_mean", "return_std", "device", "num_devices", "checkpoint", "policy_sha256", "versions", "run_dir"),
}


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    with lenient():
        yield


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*argv, run=main):
    """Runs the command line. Returns exit code, standard output and standard error without boxes and line breaks."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run([str(word) for word in argv])
        except SystemExit as ended:  # raised by tyro
            code = ended.code
    plain = (" ".join(text.getvalue().replace("│", " ").split()) for text in (out, err))
    return code, *plain


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains with the command line. Returns the run directory and the output."""
    path = tmp_path_factory.mktemp("runs") / "run"
    options = ["--total-steps", "2e3", "--seed", "3", "--run-dir", path, "--json", *SMALL]
    return path, *call("train", "CartPole-v1", *options)


@pytest.fixture
def train_arguments(monkeypatch):
    """Returns a function that runs `jppo train` and returns the arguments that `jppo.train` would get."""
    calls = []

    def stop(env, **kwargs):
        calls.append({"env": env} | kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "train", stop)
    return lambda *argv: (call("train", *argv), calls.pop())[1]


def test_help_lists_every_option_with_the_defaults_of_the_environment():
    code, out, err = call("train", "Pendulum-v1", "--help")
    assert (code, err) == (0, "")
    for options in (jppo.PPOConfig, jppo.Hyperparams, jppo.RayConfig):
        for field in dataclasses.fields(options):
            assert f" --{field.name.replace('_', '-')}" in out
    for option in ("--total-steps", "--seed", "--preset", "--run-dir", "--quiet", "--json", "--wandb", "--backend"):
        assert f" {option}" in out
    assert "Discount factor per step. (default: 0.9)" in out
    assert all(preset in out for preset in PRESETS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_listed_and_has_help(command):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    summary = cli.COMMANDS[command].__doc__.splitlines()[0].rstrip(".")
    assert f" {command} {summary}" in out
    code, out, _ = call(command, "--help")
    assert code == 0
    assert out.startswith(f"usage: jppo {command}")


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)], ids=str)
def test_help_fits_into_80_columns(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    lines = [line.rstrip() for line in out.getvalue().splitlines() if not line.startswith("usage: ")]
    assert 1 < max(map(len, lines)) <= 80


def test_every_setting_of_a_sweep_has_the_documentation_of_its_field():
    out = call("sweep", "--help")[1]
    assert "--gamma [FLOAT|SCHEDULE [FLOAT|SCHEDULE ...]] Discount factor per step." in out
    for options in (jppo.PPOConfig, jppo.Hyperparams):
        for field in dataclasses.fields(options):
            assert f" --{field.name.replace('_', '-')} [" in out


def test_help_is_also_a_command():
    assert call("help") == call("--help")


def test_numbers_of_episodes_and_steps_may_be_written_in_scientific_notation():
    assert cli.parse_command(["eval", "run", "--num-episodes", "1e2"]).num_episodes == 100
    assert cli.parse_command(["play", "run", "--max-steps", "2e3"]).max_steps == 2000


def test_bash_completes_commands_options_and_values(capsys):
    assert main(["completion", "bash"]) == 0
    Path("completion.bash").write_text(capsys.readouterr().out)
    Path("runs").mkdir()
    program = """
source completion.bash
complete -p jppo
for line in "jppo tr" "jppo train --lea" "jppo train CartPole-v1 --num-e" "jppo plot --x "; do
    IFS=' ' read -ra COMP_WORDS <<< "$line"
    [[ "$line" == *' ' ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line}
    COMPREPLY=(); _tyro_jppo; echo "${COMPREPLY[@]}"
done
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert done.stdout.splitlines() == [
        "complete -F _tyro_jppo jppo",
        "train",
        "--learning-rate",
        "--num-envs --num-epochs",
        "steps minutes",
    ]


def test_zsh_gets_a_function_of_its_completion_system():
    code, out, err = call("completion", "zsh")
    assert (code, err) == (0, "")
    assert out.startswith("#compdef jppo")
    assert "--learning-rate" in out


def test_fish_gets_a_function():
    code, out, err = call("completion", "fish")
    assert (code, err) == (0, "")
    assert "--learning-rate" in out


def test_version():
    assert call("--version") == (0, f"jppo {jppo.__version__}", "")


@pytest.mark.parametrize(
    ("argv", "preset"),
    [
        (["CartPole-v1"], "cleanrl-classic"),
        (["MountainCar-v0"], "mountaincar"),
        (["Pendulum-v1"], "pendulum"),
        (["Breakout-MinAtar"], "gymnax-minatar"),
        (["Catch-bsuite"], "default"),
        (["CartPole-v1", "--preset", "pendulum"], "pendulum"),
        (["--preset=default", "CartPole-v1"], "default"),
        (["--run-dir", "Pendulum-v1", "CartPole-v1"], "cleanrl-classic"),
        (["Catch-bsuite", "--run-dir", "Pendulum-v1"], "default"),
    ],
)
def test_the_defaults_are_those_of_the_environments_preset(train_arguments, argv, preset):
    given = train_arguments(*argv)
    assert given["config"] == PRESETS[preset].config
    assert given["hyperparams"] == PRESETS[preset].hyperparams
    assert given["total_steps"] == PRESETS[preset].total_steps
    assert given["seed"] == 0


def test_options_override_single_fields_of_the_preset(train_arguments):
    given = train_arguments("Pendulum-v1", "--gamma", "0.5", "--num-steps", "256", "--normalize-obs", "--seed", "7")
    preset = PRESETS["pendulum"]
    assert given["config"] == dataclasses.replace(preset.config, num_steps=256, normalize_obs=True)
    assert given["hyperparams"] == dataclasses.replace(preset.hyperparams, gamma=0.5)
    assert given["total_steps"] == preset.total_steps
    assert given["seed"] == 7


def options_of(values):
    """Returns the command-line options for fields."""
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            yield from (f"--{option}", *map(str, value if isinstance(value, tuple) else (value,)))


def test_every_option_reaches_its_field(train_arguments):
    changed = {
        **{"num_envs": 6, "num_steps": 10, "num_epochs": 2, "num_minibatches": 3, "network": "cnn", "num_strata": 2},
        **{"hidden_sizes": (3, 2, 1), "activation": "swish", "kl_control": "adapt", "action_bounds": "tanh"},
        **{"recurrent": "lstm", "recurrent_size": 7, "sequence_length": 5, "actor_obs": ("a",), "critic_obs": ("a",)},
        **{"compute_dtype": "bfloat16", "staggered_start": 5},
    }
    flags = {field.name: not field.default for field in dataclasses.fields(jppo.PPOConfig) if field.type is bool}
    del flags["clip_reward"]  # excludes normalize_reward
    numbers = {field.name: 0.5 * float(field.default) for field in dataclasses.fields(jppo.Hyperparams)[1:]}
    numbers["learning_rate"] = 0.125
    config = jppo.PPOConfig(**changed | flags)
    same = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == f.default]
    assert same == ["clip_reward"], "every other field must differ from its default"
    given = train_arguments("Catch-bsuite", *options_of(changed | flags | numbers))
    assert given["config"] == config
    assert given["hyperparams"] == jppo.Hyperparams(**numbers)
    assert train_arguments("Catch-bsuite", "--hidden-sizes")["config"].hidden_sizes == ()
    assert train_arguments("Catch-bsuite", "--clip-reward")["config"].clip_reward


def test_schedules_reach_their_fields(train_arguments):
    words = ("--ent-coef", "0.01:0", "--learning-rate", "warmup:0.1:cosine:3e-4:0", "--gamma=exponential:0.9:0.99")
    given, schedules = train_arguments("CartPole-v1", *words)["hyperparams"], jppo.schedules
    assert given.ent_coef == schedules.linear(0.01, 0)
    assert given.learning_rate == schedules.warmup(0.1, schedules.cosine(3e-4, 0))
    assert given.gamma == schedules.exponential(0.9, 0.99)
    out = call("train", "CartPole-v1", "--help")[1]
    assert "Step size of Adam. (default: 0.00025:0)" in out


def test_every_option_of_the_actors_reaches_its_field(train_arguments):
    changed = {"num_actors": 2, "envs_per_actor": 3, "policy_lag": 1, "actor_cpus": 0.5, "actor_gpus": 0.25}
    changed |= {"address": "auto", "actor_timeout": 9.5, "max_restarts": 1}
    assert set(changed) == {field.name for field in dataclasses.fields(jppo.RayConfig)}
    given = train_arguments(
        "Taxi-v4", "--num-envs", "6", "--num-devices", "2", "--backend", "ray", *options_of(changed)
    )
    assert given["ray"] == jppo.RayConfig(**changed)
    assert (given["num_devices"], given["backend"], given["config"].num_envs) == (2, "ray", 6)
    given = train_arguments("Taxi-v4")
    assert given["ray"] == jppo.RayConfig()
    assert (given["num_devices"], given["backend"]) == (None, "auto")


def test_envs_per_actor_changes_num_envs_and_keeps_num_steps(train_arguments):
    actors = ["--backend", "ray", "--num-actors", "8", "--envs-per-actor", "4"]
    given = train_arguments("CartPole-v1", *actors)
    assert (given["config"].num_envs, given["config"].num_steps) == (32, 128)
    assert given["ray"] == jppo.RayConfig(num_actors=8, envs_per_actor=4)
    given = train_arguments("CartPole-v1", *actors, "--num-steps", "64")
    assert (given["config"].num_envs, given["config"].num_steps) == (32, 64)
    given = train_arguments("CartPole-v1", *actors, "--num-envs", "32")
    assert (given["config"].num_envs, given["config"].num_steps) == (32, 128)


@pytest.mark.parametrize(("written", "steps"), [("5e5", 500_000), ("500_000", 500_000), ("7", 7), ("1.5e1", 15)])
def test_total_steps_may_be_written_in_several_ways(train_arguments, written, steps):
    given = train_arguments("CartPole-v1", "--total-steps", written)["total_steps"]
    assert given == steps
    assert type(given) is int


def test_the_default_run_directory_has_environment_time_and_seed(train_arguments):
    assert train_arguments("CartPole-v1", "--run-dir", "a/b")["run"].run_dir == Path("a/b")
    assert train_arguments("CartPole-v1", "--seed", "4")["run"].run_dir.match("runs/CartPole-v1/*-4")


def test_value_errors_of_a_bug_in_jppo_keep_their_traceback(monkeypatch):
    bug = compile("def run(self):\n    raise ValueError('a bug')", cli.__file__, "exec")
    exec(bug, names := {})
    monkeypatch.setattr(cli.Doctor, "run", names["run"])
    with pytest.raises(ValueError, match="a bug"):
        main(["doctor"])


def test_no_command_prints_the_usage():
    assert call() == (2, "", "usage: jppo [-h] [--version] COMMAND ... `jppo --help` lists the commands")


def test_training_ends_standard_output_with_json(trained):
    path, code, out, err = trained
    assert code == 0
    summary = json.loads(out)
    assert set(summary) == SUMMARY
    assert (summary["env"], summary["backend"], summary["num_devices"]) == ("CartPole-v1", "device", 1)
    assert (summary["steps"], summary["updates"], summary["status"]) == (2048, 16, "finished")
    assert summary["run_dir"] == str(path)
    assert {"python", "jppo", "jax", "gymnax"} <= set(summary["versions"])
    assert summary == read_summary(path)
    metrics = read_metrics(path)
    assert metrics["env_steps"][-1] == 2048
    assert metrics["episode/count"].sum() == summary["episodes"] > 0
    for said in ("compiled in", "2,048/2,000 steps", "finished: 2,048 steps, 16 updates", f"saved in {path}"):
        assert said in err


def test_output_that_cannot_be_written(trained):
    """Training ignores a closed output; commands that only print fail."""
    commands = {0: ["train", "CartPole-v1", "--resume"], 3: ["eval", "--num-episodes", "2"]}
    for code, words in commands.items():
        with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
            assert main([*words, str(trained[0])]) == code


class LostSimulator(gymnasium.Env):
    """Loses the connection to its simulator in the method that `where` names."""

    observation_space, action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,)), gymnasium.spaces.Discrete(2)
    where, error = "", OSError()

    def call(self, name):
        if name == self.where:
            raise self.error
        return np.zeros(1, np.float32)

    def __init__(self):
        self.call("make")

    def reset(self, *, seed=None, options=None):
        return self.call("reset"), {}

    def step(self, action):
        return self.call("step"), 0.0, True, False, {}


@pytest.mark.parametrize("where", ["make", "reset", "step"])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), ConnectionRefusedError(111, "no"), TimeoutError()]
)
def test_an_os_error_of_an_environment_is_not_one_of_the_output(monkeypatch, where, error):
    monkeypatch.setattr(LostSimulator, "where", where)
    monkeypatch.setattr(LostSimulator, "error", error)
    with pytest.raises(type(error)):
        main(
            [
                "train",
                f"{__name__}:LostSimulator",
                "--num-actors",
                "0",
                "--total-steps",
                "64",
                "--run-dir",
                "run",
                *SMALL,
            ]
        )


@pytest.mark.parametrize("command", ["envs | head -n 1", "--help >&-", "--help | head -n 1", "--version 2>&-"])
def test_a_closed_output_is_no_error(command):
    line = f"{sys.executable} -m jppo {command}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_interrupt_during_the_imports_is_one_line():
    code = (
        "import os, signal, sys, types, jppo.__main__ as entry\n"
        "class Slow(types.ModuleType):\n"
        "    def __getattr__(self, name): os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.modules['jppo.cli.main'] = Slow('jppo.cli.main')\n"
        "entry.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "jppo: interrupted\n")


def test_an_interrupt_on_a_terminal_is_reported_below_the_progress_line():
    screen, terminal = os.openpty()
    code = "import os; from jppo.cli.interrupt import exit_at_once; os.write(2, b'step 1'); exit_at_once(2, None)"
    assert subprocess.run([sys.executable, "-c", code], stderr=terminal, check=False).returncode == 130
    assert os.read(screen, 100) == b"step 1\r\njppo: interrupted\r\n"
    os.close(terminal)
    os.close(screen)


def test_a_warning_is_one_line():
    code = (
        "import sys, warnings; from jppo.cli import envs, main; sys.argv = ['jppo', 'envs'];"
        r"envs.Envs.run = lambda self: warnings.warn('\x1b[33mthe policy\nis damaged\x1b[0m') or 0;"
        "sys.exit(main.main())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == "jppo: warning: the policy is damaged\n"


def test_a_traceback_cannot_change_the_terminal():
    code = (
        "import sys; from jppo.cli import envs, main; sys.argv = ['jppo', 'envs'];"
        r"envs.Envs.run = lambda self: (_ for _ in ()).throw(OSError('\x1b]0;title')); sys.exit(main.main())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback (most recent call last):\n")
    assert "\x1b" not in ended.stderr


@pytest.mark.parametrize("end", ["pass", "sys.exit()", "1 / 0"])
def test_a_process_that_an_environment_forks_does_not_return_to_jppo(end):
    code = (
        "import os, sys; from jppo.errors import forbid_exit\n"
        "def step():\n"
        "    child = os.fork()\n"
        f"    if not child: {end}\n"
        "    return os.waitpid(child, 0)\n"
        "forbid_exit(step)()\n"
        "print('training')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("training\n", "")


@pytest.mark.slow
def test_sweep(tmp_path):
    """Two shapes, two learning rates and two seeds, with run directories. The second call finds all results."""
    words = ["sweep", "CartPole-v1", "--seeds", 2, "--learning-rate", 1e-3, 1e-2, "--hidden-sizes", "8", "8,8"]
    words += ["--num-envs", 8, "--num-steps", 16, "--num-minibatches", 2, "--total-steps", "1e3", "--num-devices", 1]
    words += ["--normalize-obs", "True", "--sweep-dir", tmp_path / "sweep", "--run-dirs"]
    code, out, _ = call(*words)
    assert code == 0
    said = (
        "8 runs in 2 programs",
        "hidden_sizes = 8x8, normalize_obs = True: 4 runs",
        "saved in",
        "2 finished",
    )
    for text in said:
        assert text in out, text
    runs = [load_run(path) for path in (tmp_path / "sweep" / "run_dirs").iterdir()]
    found = sorted(
        (r.agent.config.hidden_sizes, r.settings["hyperparams"]["learning_rate"], r.settings["seed"]) for r in runs
    )
    assert found == [(sizes, rate, seed) for sizes in ((8,), (8, 8)) for rate in (1e-3, 1e-2) for seed in (0, 1)]
    assert all(r.agent.config.normalize_obs for r in runs)
    assert call("eval", next((tmp_path / "sweep" / "run_dirs").iterdir()), "--num-episodes", 4)[0] == 0
    code, out, err = call(*words, "--json")
    assert code == 0
    assert "0 runs in 0 programs; 8 runs already saved" in err
    summary = json.loads(out)
    others = dict.fromkeys(("solved", "diverged", "stopped", "interrupted", "not_started"), 0)
    assert summary["runs"] == {"finished": 8} | others
    settings = {"learning_rate", "hidden_sizes", "num_envs", "num_steps", "num_minibatches", "normalize_obs"}
    assert set(summary["best"]["CartPole-v1"]["settings"]) == settings


@pytest.mark.parametrize("options", [(), ("--sweep-dir", "my sweep")])
def test_an_interrupted_sweep_prints_the_command_that_continues_it(monkeypatch, options):
    def interrupted(*args, sweep_dir, **kwargs):
        Path(sweep_dir).mkdir(parents=True)
        return SweepResult([], [], Path(sweep_dir).absolute(), not_started=2)

    monkeypatch.setattr("jppo.sweeps.sweep.sweep", interrupted)
    code, out, _ = call("sweep", "CartPole-v1", "--learning-rate", "1e-3", "1e-4", *options)
    assert code == 130
    command = "next: jppo sweep CartPole-v1 --learning-rate 1e-3 1e-4 --sweep-dir "
    assert re.search(re.escape(command) + ("'my sweep'$" if options else r"runs/sweeps/[\d-]+$"), out)


@pytest.mark.slow
def test_sweep_with_population_based_training(tmp_path):
    """Four runs exchange twice; `jppo plot` draws the saved sweep."""
    words = ["sweep", "CartPole-v1", "--seeds", 2, "--learning-rate", 1e-4, 1e-2, "--selection", "pbt"]
    words += [
        "--pbt-every",
        3,
        "--pbt-fraction",
        0.5,
        "--total-steps",
        8 * 32,
        "--num-devices",
        1,
        "--sweep-dir",
        tmp_path / "sweep",
    ]
    code, out, _ = call(*words, "--hidden-sizes", 8, "--num-envs", 4, "--num-steps", 8, "--num-minibatches", 1)
    assert code == 0
    for text in ("last learning_rate", " time", "saved in", "copies.csv, curves.png, runs.csv"):
        assert text in out, text
    assert len((tmp_path / "sweep" / "copies.csv").read_text().splitlines()) == 1 + 2 * 2
    assert call("plot", tmp_path / "sweep", "--output", "p.png") == (0, "wrote p.png", "")
    assert Path("p.png").read_bytes() == (tmp_path / "sweep" / "curves.png").read_bytes()
    assert call("plot", tmp_path / "sweep", tmp_path)[2] == "jppo: pass either one sweep directory or run directories"
    (tmp_path / "sweep.json").write_text("{}")
    assert "is not a sweep directory of this version of jppo" in call("plot", tmp_path)[2]


@pytest.fixture
def pretend(trained, monkeypatch):
    """Replaces `train` by a function that returns a status at once."""

    def ending(status, error=None, env="CartPole-v1", **fields):
        summary = json.loads(trained[2]) | {"status": status, "return_mean": float("nan")} | fields
        agent = SimpleNamespace(env=jppo.make_env(env))
        result = SimpleNamespace(summary=summary, run_dir=Path("my runs/1"), agent=agent)

        def train(env, **kwargs):
            if error is not None:
                raise error(result)
            return result

        monkeypatch.setattr(driver, "train", train)

    return ending


@pytest.mark.parametrize(
    ("status", "error", "code", "said"),
    [
        ("finished", None, 0, ""),
        ("interrupted", None, 130, ""),
        ("diverged", lambda result: TrainingDiverged(3, result), 1, "jppo: update 3 made a loss, gradient or"),
        ("", lambda result: KeyboardInterrupt(), 130, "jppo: interrupted"),
    ],
)
def test_exit_codes(pretend, status, error, code, said):
    pretend(status, error)
    ended, out, err = call("train", "CartPole-v1", "--quiet")
    assert (ended, out) == (code, "")
    assert err.startswith(said)
    assert bool(err) == bool(said)


def test_an_interrupted_run_prints_the_command_that_resumes_it(pretend):
    pretend("interrupted")
    assert "next: jppo train CartPole-v1 --resume 'my runs/1' jppo eval" in call("train", "CartPole-v1")[1]
    pretend("finished")
    assert "resume" not in call("train", "CartPole-v1")[1]


def test_training_prints_the_next_commands(pretend):
    pretend("finished")
    run = "'my runs/1'"
    assert call("train", "CartPole-v1")[1].endswith(f"next: jppo eval {run} jppo play {run} jppo plot {run}")
    out = call("train", "corridors:Corridor", "--backend", "ray")[1]
    env = "--env corridors:Corridor"
    assert out.endswith(f"next: jppo eval {run} {env} jppo play {run} {env} jppo plot {run}")
    assert "next:" not in call("train", "CartPole-v1", "--json")[2]
    pretend("finished", env="DeepSea-bsuite")
    assert call("train", "DeepSea-bsuite")[1].endswith(f"next: jppo eval {run} jppo plot {run}")


def test_a_run_without_updates_has_no_next_commands(pretend):
    pretend("diverged", lambda result: TrainingDiverged(1, result), updates=0)
    assert "next:" not in call("train", "CartPole-v1")[1]


def test_summary_names_the_evaluation_that_ended_the_run(pretend):
    pretend("solved", return_mean=151.2, eval_return_mean=480.0)
    assert "last evaluation: return 480.0 saved in" in call("train", "CartPole-v1")[1]


def test_quiet_and_json_output(pretend):
    pretend("finished")
    _, out, err = call("train", "CartPole-v1")
    assert out.startswith("finished: 2,048 steps")
    assert "no episode ended" in out
    assert err == ""
    _, out, err = call("train", "CartPole-v1", "--quiet", "--json")
    assert json.loads(out)["return_mean"] is None
    assert err == ""
    assert call("train", "CartPole-v1", "--quiet") == (0, "", "")


@pytest.mark.slow
def test_eval(trained):
    path = trained[0]
    code, out, err = call("eval", path, "--num-episodes", "20", "--json")
    assert (code, err) == (0, "")
    greedy = json.loads(out)
    assert set(greedy) == {
        *("env", "sampled", "episodes", "return_mean", "return_std"),
        *("return_min", "return_max", "length_mean", "unfinished"),
    }
    assert (greedy["env"], greedy["sampled"], greedy["episodes"], greedy["unfinished"]) == ("CartPole-v1", False, 20, 0)
    assert greedy["return_mean"] == pytest.approx(greedy["length_mean"]), "the reward of CartPole is 1 per step"
    assert 5 < greedy["return_min"] < greedy["return_mean"] < greedy["return_max"] <= 500
    text = call("eval", path, "--num-episodes", "20")[1]
    assert text.startswith(f"CartPole-v1, greedy, 20 episodes return {greedy['return_mean']:.2f} +- ")
    cut = call("eval", path, "--num-episodes", "4", "--max-steps", "3")[1]
    assert cut.endswith("length 3.0 4 episodes did not end within --max-steps 3")
    sampled = ["eval", path, "--num-episodes", "20", "--sampled", "--json"]
    draws = [json.loads(call(*sampled, *more)[1]) for more in ([], [], ["--seed", "1"])]
    assert draws[0]["sampled"]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0]["return_mean"] != greedy["return_mean"]


@pytest.mark.parametrize("episodes", ["0", "-1", "10000000000"])
def test_eval_refuses_odd_numbers_of_episodes(trained, episodes):
    code, out, err = call("eval", trained[0], "--num-episodes", episodes)
    assert (code, out) == (2, "")
    assert f"num_episodes = {episodes} must be" in err


def test_plot_of_two_seeds(trained):
    other = shutil.copytree(trained[0], Path("other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"seed": 4}))
    assert [len(group.runs) for group in read_groups([trained[0], other])] == [2]
    assert call("plot", trained[0], other, "--output", "a.png") == (0, "wrote a.png", "")
    with Image.open("a.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10, "the plot is empty"
    words = ["--metrics", "loss/policy", "loss/value", "--x", "minutes", "--output", "b.png"]
    assert call("plot", trained[0], *words) == (0, "wrote b.png", "")
    with Image.open("b.png") as picture:
        assert picture.size[0] == 1584
    code, _, err = call("plot", trained[0], "--output", "no/a.png")
    assert (code, err) == (2, "jppo: output no/a.png cannot be written: there is no directory no")


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from drawing packages
def test_play(env):
    save_run(Path("run"), env)
    code, out, _ = call("play", "run", "--max-steps", "6", "--sampled", "--output", "a.gif")
    assert code == 0
    assert out.startswith("wrote a.gif: 6 steps, return ")
    with Image.open("a.gif") as film:
        assert film.format == "GIF"
        assert min(film.size) >= 100
        assert 2 <= film.n_frames <= 6  # equal frames are merged


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("DeepSea-bsuite", [], "DeepSea-bsuite cannot be drawn: it has no render function; `jppo envs` "),
        ("CartPole-v1", ["--output", "a.png"], "output a.png must end in .gif"),
        ("CartPole-v1", ["--output", "no/a.gif"], "there is no directory no"),
        ("CartPole-v1", ["--max-steps", "0"], "max_steps = 0 must be a whole number of at least 1"),
        ("CartPole-v1", ["--max-steps", "2", "--output", "/proc/a.gif"], "output /proc/a.gif cannot be written"),
    ],
)
def test_play_refuses(env, options, message):
    save_run(Path("run"), env)
    code, out, err = call("play", "run", *options)
    assert (code, out) == (2, "")
    assert message in err.partition("jppo: ")[2]  # a slow machine first shows which frame is drawn
    assert [path.name for path in Path().iterdir()] == ["run"]


OWN = """
import gymnasium
import numpy as np

class Corridor(gymnasium.Env):
    '''Ten steps; action 1 is worth 1.'''

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    limit = 10

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.full(1, self.time / self.limit, np.float32), float(action), False, self.time == self.limit, {}

    def render(self):
        return np.full((100, 120, 3), 25 * self.time % 256, np.uint8)

class Long(Corridor):
    limit = 600

def unseen():
    return Corridor()
"""


@pytest.fixture
def shell(monkeypatch):
    """Returns a function that runs the installed command in a directory with a custom environment."""
    Path("corridors.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    before = signal.getsignal(signal.SIGINT)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["jppo", *map(str, argv)])
        return call(run=lambda _: main())

    yield run
    signal.signal(signal.SIGINT, before)
    gc.unfreeze()
    sys.modules.pop("corridors", None)


@pytest.mark.slow
def test_a_custom_environment_from_training_to_gif(shell):
    options = ["--backend", "ray", "--num-actors", "0", "--total-steps", "2e3", "--learning-rate", "0.02", *SMALL]
    code, out, err = shell("train", "corridors:Corridor", *options, "--run-dir", "run", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary == read_summary(Path("run"))
    actors = {"num_actors", "envs_per_actor", "policy_lag", "lost_fragments", "restarts"}
    assert set(summary) == SUMMARY | actors | {"best_update", "best_return"}
    assert (summary["env"], summary["backend"], summary["status"]) == ("corridors:Corridor", "ray", "finished")
    assert (summary["num_actors"], summary["envs_per_actor"], summary["policy_lag"]) == (0, 8, 0)
    assert (summary["steps"], summary["updates"]) == (2048, 16)
    assert summary["episodes"] == read_metrics(Path("run"))["episode/count"].sum() == 8 * (2048 // 8 // 10)
    for said in (
        "environments in this process",
        "2,048/2,000 steps",
        "finished: 2,048 steps",
        "saved in run",
    ):
        assert said in err
    named = ["--env", "corridors:Corridor"]
    code, out, err = shell("eval", "run", "--num-episodes", "5", "--json", *named)
    assert (code, err) == (0, "")
    played = json.loads(out)
    assert (played["env"], played["episodes"], played["length_mean"]) == ("corridors:Corridor", 5, 10.0)
    assert played["return_mean"] == 10.0, "the policy must learn to go right"
    assert shell("play", "run", "--output", "a.gif", *named)[:2] == (0, "wrote a.gif: 10 steps, return 10.00")
    with Image.open("a.gif") as film:
        assert (film.format, film.size, film.n_frames) == ("GIF", (120, 100), 10)
    assert shell("plot", "run", "--output", "a.png")[0] == 0
    code, out, err = shell("play", "run", "--output", "b.gif", "--env", "corridors:unseen")
    assert (code, out) == (2, "")
    assert err.startswith("jppo: corridors:unseen cannot be drawn: its render_mode is None")
    assert not Path("b.gif").exists()


def test_a_module_that_only_config_json_names_is_not_imported(trained):
    run = shutil.copytree(trained[0], Path("run"))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"env": "sys:exit", "backend": "ray"}))
    for words in (["eval", "run"], ["play", "run"], ["export", "run", "a.npz"]):
        code, out, err = call(*words)
        assert (code, out) == (2, "")
        assert "run was trained in sys:exit, which would import a module" in err
        assert "in Python load_policy(run_dir, trust_env=True)" in err
        assert len(err) < 160
    with pytest.raises(ValueError, match=r"load_policy\(run_dir, trust_env=True\)"):
        jppo.export_policy(run, "a.npz")
    with pytest.raises(RuntimeError, match="the environment called"):
        jppo.export_policy(run, "a.npz", trust_env=True)
    with pytest.raises(RuntimeError, match="the environment called"):
        jppo.load_policy(run, trust_env=True)
    with pytest.raises(RuntimeError, match="the environment called"):
        jppo.load_policy(run, env="sys:exit")


@pytest.mark.parametrize("option", ["--resume", "--run-dir"])
def test_a_run_with_parts_of_python_is_resumed_in_python(tmp_path, option):
    for settings, words in (
        ({"callback_every": 4}, "own callback; resume it in Python: jppo.train(..., run_dir='RUN', callback=...)"),
        ({"network": "custom", "loss": "custom"}, "own network and loss; resume it in Python: jppo.train(..., run_dir"),
    ):
        path = write_run(tmp_path / words[4:12], [1.0], **settings)
        code, _, err = call("train", "CartPole-v1", option, str(path))
        assert (code, len(err.splitlines())) == (2, 1)
        assert words in err.replace(str(path), "RUN")


@pytest.mark.slow
def test_a_run_of_a_custom_jax_environment_is_evaluated_with_env():
    config = jppo.PPOConfig(4, 8, num_minibatches=1)
    jppo.train(probes.Counting(), config=config, total_steps=32, run_dir="run")
    code, _, err = call("eval", "run")
    assert code == 2
    assert "run was trained in a custom environment, Counting; name it with --env module:name" in err
    code, out, err = call("eval", "run", "--num-episodes", "2", "--env", "probes:Counting")
    assert (code, err) == (0, "")
    assert "probes:Counting, greedy, 2 episodes" in out
    with pytest.raises(ValueError, match=r"in Python, use jppo.load_policy\(run_dir, env=...\) or jppo.evaluate\("):
        jppo.evaluate("run")
    for env in (probes.Counting(), "probes:Counting"):
        assert len(jppo.evaluate(env, "run", num_episodes=2).returns) == 2
    assert jppo.export_policy("run", "a.npz", env=probes.Counting()).exists()
    code, _, err = call("eval", "run", "--env", "probes:Missing")
    assert (code, err) == (2, "jppo: probes:Missing: module probes has no Missing; did you mean Moving?")


def test_an_environment_with_other_spaces_than_the_policy_is_one_line(trained):
    for env in ("probes:Counting", "Pendulum-v1"):
        code, out, err = call("eval", trained[0], "--env", env)
        assert (code, out) == (2, "")
        assert err.startswith(f"jppo: {env} does not fit the policy in {trained[0]}, which was trained in CartPole-v1")


def test_the_backend_of_a_module_follows_from_its_object():
    assert choose_backend("probes:Counting") == "device"
    assert choose_backend("host_probes:Counting") == "ray"
    code, out, _ = call("check-env", "probes:Counting", "--steps", 16, "--num-envs", 2)
    assert (code, out.partition(":")[0]) == (0, "probes")


def test_control_characters_of_a_damaged_config_do_not_reach_the_terminal(trained):
    runs = Path("runs")
    for name, change in {
        "env": {"env": "Cart\x1b[2JPole"},
        "type": {"seed": "\x1b[2J"},
        "other": {"actors": {}, "\x1b[2J": "\x07", "activation": "\x1b[2J"},
    }.items():
        run = shutil.copytree(trained[0], runs / name)
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | change))
    folders = sorted(runs.iterdir())
    for words in (["runs"], ["compare", runs / "env", runs / "other"], *(["eval", folder] for folder in folders)):
        _, out, err = call(*words)
        assert out + err
        assert (out + err).isprintable(), words


def test_envs_lists_whole_names_in_80_columns(capsys):
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split("  ") for line in out.splitlines() if line}
    assert set(available()) <= set(rows)
    assert len(available()) == 26
    assert max(map(len, out.splitlines())) <= 80
    assert [cell.strip() for cell in rows["CartPole-v1"] if cell] == [
        "CartPole-v1",
        "device, ray",
        "cleanrl-classic",
        "yes",
    ]
    assert [cell.strip() for cell in rows["DeepSea-bsuite"] if cell] == ["DeepSea-bsuite", "device", "default", "no"]
    assert not [name for name in rows if name.startswith("GymV")], "adapters are not environments"


def test_envs_lists_the_tasks_of_an_installed_envpool(capsys, monkeypatch):
    envpool = ModuleType("envpool")
    envpool.__spec__ = ModuleSpec("envpool", None)
    modules = {"Pong-v5": "envpool.atari", "HalfCheetah-v4": "envpool.mujoco.gym", "Taxi-v3": "envpool.toy_text"}
    envpool.list_all_envs = lambda: list(modules)
    registry = SimpleNamespace(specs={task: (module, "Spec", {}) for task, module in modules.items()})
    monkeypatch.setitem(sys.modules, "envpool", envpool)
    monkeypatch.setitem(sys.modules, "envpool.registration", SimpleNamespace(registry=registry))
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines() if line.startswith("envpool:")]
    assert rows == [
        "envpool:HalfCheetah-v4 ray mujoco yes",
        "envpool:Pong-v5 ray atari yes",
        "envpool:Taxi-v3 ray taxi no",
    ]
    assert "jppo[envpool]" not in out


def test_envs_lists_names_that_contain_a_text(capsys):
    assert main(["envs", "minatar"]) == 0
    out = capsys.readouterr().out
    names = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert len(names) == 5
    assert all(name.endswith("-MinAtar") for name in names)
    assert "pip install" not in out


def test_envs_lists_the_environments_of_a_group(capsys):
    pytest.importorskip("mujoco")
    assert main(["envs", "MuJoCo"]) == 0
    out = capsys.readouterr().out
    assert "\nHalfCheetah-v5 " in out
    assert "CartPole" not in out


def test_envs_explains_an_empty_list(capsys, monkeypatch):
    monkeypatch.setattr(modules, "is_installed", lambda family: False)
    assert main(["envs", "xyzzy"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("jppo: no installed environment has 'xyzzy' in its name; `jppo envs` lists all")
    assert main(["envs", "jumanji"]) == 2
    assert capsys.readouterr().err == "jppo: jumanji is not installed; pip install 'jppo[jumanji]'\n"


def test_envs_tells_how_to_install_mujoco(capsys, monkeypatch):
    monkeypatch.setattr(modules, "is_installed", lambda family: False)
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    assert "  mujoco      pip install 'jppo[mujoco]'\n" in out
    assert "  box2d       pip install 'jppo[box2d]'\n" in out


def test_play_shows_progress_on_the_standard_error(monkeypatch):
    clock, err = SimpleNamespace(now=0.0), io.StringIO()
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(sys, "stderr", err)
    with output.StatusLine() as status:
        for clock.now in range(1, 12):
            status.show(f"step {clock.now}")
    assert err.getvalue() == "step 5\nstep 10\n"
    err.isatty = lambda: True
    with pytest.raises(ValueError, match="no frame"), output.StatusLine() as status:  # noqa: PT012
        for clock.now in (12, 12.01, 13):
            status.show(f"step {clock.now}")
        raise ValueError("no frame")
    assert err.getvalue().removeprefix("step 5\nstep 10\n") == "step 12\rstep 13\r       \r"


@pytest.mark.slow
def test_play_shows_a_whole_long_episode(shell):
    options = ["--num-actors", "0", "--total-steps", "64", "--num-envs", "2", "--num-steps", "32", "--quiet"]
    assert shell("train", "corridors:Long", *options, "--run-dir", "run")[0] == 0
    words = ["play", "run", "--env", "corridors:Long", "--output", "a.gif"]
    assert shell(*words)[1].startswith("wrote a.gif: 600 steps, return ")
    out = shell(*words, "--max-steps", "6")[1]
    assert out.endswith("(the episode did not end within --max-steps 6)")


@pytest.mark.parametrize(
    ("argv", "safe", "added"),
    [
        (["train", "corridors:Corridor"], False, True),
        (["check-env", "corridors:Corridor"], False, True),
        (["train", "corridors:Corridor"], True, False),
        (["train", "CartPole-v1"], False, False),
        (["train", "envpool:Pong-v5"], False, False),
        (["plot", "run:1"], False, False),
        (["envs"], False, False),
    ],
)
def test_the_current_directory_is_last_on_the_path_if_an_argument_is_a_module(monkeypatch, argv, safe, added):
    monkeypatch.setattr(cli, "sys", SimpleNamespace(path=["lib"], flags=SimpleNamespace(safe_path=safe)))
    cli._add_current_directory(cli.parse_command(argv))
    assert cli.sys.path == ["lib", str(Path.cwd())] if added else ["lib"]


def test_files_in_the_current_directory_do_not_hide_packages():
    Path("tyro.py").write_text("raise SystemExit('foreign code')")
    environment = os.environ | {"PYTHONPATH": str(Path(jppo.__file__).parents[1])}
    command = [sys.executable, "-m", "jppo", "envs", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=DEADLINE, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: jppo envs")


LEAVING = """
import sys
import gymnasium
import jppo
def on_device():
    sys.exit(0)
class Drawn(gymnasium.Wrapper):
    def render(self):
        sys.exit(0)
def on_host(render_mode=None):
    return Drawn(gymnasium.make("CartPole-v1", render_mode=render_mode))
"""


@pytest.mark.parametrize("command", ["train", "check-env", "bench"])
def test_an_environment_that_ends_the_process_is_an_error(command, monkeypatch):
    Path("leaving.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "leaving", raising=False)
    code, out, err = call(command, "leaving:on_device", "--backend", "device")
    assert code != 0
    assert "it raised SystemExit: 0" in out if command == "check-env" else "sys.exit(0)" in err


def test_an_environment_that_ends_the_process_when_it_is_drawn_is_an_error(monkeypatch):
    Path("leaving.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "leaving", raising=False)
    import leaving

    envs = jppo.make_host_env(leaving.on_host).make([0], render=True)
    with pytest.raises(ValueError, match=r"cannot be drawn here: the environment called sys\.exit\(0\)"):
        envs.render()
    envs.close()


def test_a_platform_that_jax_lacks_is_named():
    environment = os.environ | {"PYTHONPATH": str(Path(jppo.__file__).parents[1]), "JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-m", "jppo", "train", "CartPole-v1", "--num-devices", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=DEADLINE, check=False)
    assert ended.returncode == 2
    assert ended.stderr.endswith(
        "jppo: JAX_PLATFORMS=cuda names a platform that JAX does not have here; unset it, or see `jppo doctor`\n"
    )


@pytest.mark.slow
def test_the_current_directory_is_last_on_the_path_of_actors(tmp_path):
    Path("msgpack.py").write_text("raise ImportError('foreign code')")
    note = "import json, os, sys\nopen(f'path-{os.getpid()}.json', 'w').write(json.dumps(sys.path))\n"
    Path("corridors.py").write_text(note + OWN)
    options = ["--num-actors", "1", "--num-envs", "2", "--num-steps", "32", "--total-steps", "64"]
    process = start("sys.path.remove(''); sys.exit(main())", "train", "corridors:Corridor", *options, "--quiet")
    assert process.communicate(timeout=DEADLINE) == ("", "")
    paths = [json.loads(note.read_text()) for note in Path().glob("path-*.json")]
    assert len(paths) == 2, "of the driver and of the actor"
    for path in paths:
        assert path.index(str(tmp_path)) == len(path) - 1


def test_the_script_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="jppo")
    assert script.load() is importlib.import_module("jppo.__main__").main


def start(program, *argv):
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; from jppo.cli.main import main; {program}", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_help_loads_nothing_heavy():
    program = """
try:
    main()
finally:
    print("\\nloaded", *{"jax", "numpy", "gymnax", "flax", "matplotlib", "rich.progress"} & set(sys.modules))
"""
    process = start(program, "--help")
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (0, "")
    assert "usage: jppo" in out
    assert out.endswith("\nloaded\n")


def test_ctrl_c_works_in_a_callback_that_swallows_exceptions():
    program = """
import gc, os, signal
gc.callbacks.append(lambda *args: os.kill(os.getpid(), signal.SIGINT))
sys.exit(main())
"""
    process = start(program, "envs")
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out, err) == (130, "", "jppo: interrupted\n")


def test_ctrl_c_ends_training_early_and_saves(tmp_path):
    path = tmp_path / "run"
    process = start("sys.exit(main())", "train", "CartPole-v1", "--total-steps", "1e9", "--run-dir", str(path), *SMALL)
    try:
        end = time.monotonic() + DEADLINE
        while not (path / "metrics.jsonl").exists() or not (path / "metrics.jsonl").read_text().count("\n"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "training does not start"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert (process.returncode, err) == (130, "")
    assert "stopping; completed updates are kept" in out
    assert "interrupted: " in out
    summary = read_summary(path)
    assert summary["status"] == "interrupted"
    assert summary["updates"] == len(read_metrics(path)["update"]) >= 1
    assert load_run(path).settings["total_steps"] == 10**9
    with pytest.raises(ProcessLookupError):  # no process is left
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["train", "CartPole-v1"], 4),
        (["train", "Taxi-v4", "--num-actors", "2"], 4),
        (["train", "CartPole-v1", "--num-devices", "2"], 2),
        (["train", "CartPole-v1", "--num-devices", "99"], 8),
        (["bench", "CartPole-v1"], 4),
        (["sweep", "CartPole-v1"], 4),
        (["doctor"], 4),
        (["train", "CartPole-v1", "--num-devices", "1"], None),
        (["eval", "runs/x"], None),
    ],
)
def test_a_cpu_has_one_device_per_core_or_num_devices(monkeypatch, words, count):
    monkeypatch.setattr(cli, "num_cores", lambda: 4)
    option = "--xla_force_host_platform_device_count="
    for flags in ("", f"{option}3"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        cli.configure_jax(cli.parse_command(words))
        assert os.environ["XLA_FLAGS"] == (flags or (f"{option}{count}" if count else ""))


@pytest.mark.parametrize("command", [cli.Train, cli.Sweep])
def test_commands_have_the_defaults_of_run_config(command):
    """A flag is False instead of None."""
    shared = {field.name: field.default for field in dataclasses.fields(jppo.RunConfig)}
    options = {field.name: field.default for field in dataclasses.fields(command) if field.name in shared}
    assert {"eval_every", "eval_episodes", "eval_sampled", "stop_at_return"} <= set(options)
    options = {name: value for name, value in options.items() if name != "resume"}  # a directory
    assert all(shared[name] in (value, None if value is False else value) for name, value in options.items())
    assert (pbt_trainer.CHECKPOINT_SECONDS, cli.Sweep.pbt_fraction) == (
        jppo.RunConfig.checkpoint_seconds,
        jppo.PBTConfig.fraction,
    )


def test_a_resumed_run_without_evaluations_has_no_settings_of_them(tmp_path):
    """--eval-sampled of the run before would be an error."""
    saved = run_config("CartPole-v1", "device", 0, 500, jppo.PPOConfig(), jppo.Hyperparams())
    saved |= {"eval_every": 2, "eval_sampled": True}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    words = ["train", "CartPole-v1", "--run-dir", str(tmp_path)]
    assert cli.parse_command(words).eval_sampled
    assert not cli.parse_command([*words, "--eval-every", "0"]).eval_sampled
    assert cli.parse_command([*words, "--eval-every", "0", "--eval-sampled"]).eval_sampled


def test_resuming_needs_no_environment_unless_it_is_a_module(tmp_path):
    config = run_config("CartPole-v1", "device", 0, 500, jppo.PPOConfig(), jppo.Hyperparams())
    path = tmp_path / "config.json"
    for option in ("--resume", "--run-dir"):
        path.write_text(json.dumps(config))
        assert cli.parse_command(["train", option, str(tmp_path)]).env == "CartPole-v1"
        path.write_text(json.dumps(config | {"env": "probes:Missing"}))
        with pytest.raises(SystemExit):
            cli.parse_command(["train", option, str(tmp_path)])
    with pytest.raises(ValueError, match=r"typo is not a run directory: it has no config\.json"):
        cli.parse_command(["train", "--resume", str(tmp_path / "typo")])
    with pytest.raises(SystemExit):
        cli.parse_command(["train", "--resume", str(tmp_path / "typo"), "--help"])


@pytest.mark.slow
def test_a_resumed_run_has_the_previous_number_of_devices(tmp_path):
    path = tmp_path / "run"
    jppo.train("CartPole-v1", config=jppo.PPOConfig(4, 8, num_minibatches=1), total_steps=32, run_dir=path)
    for option in ("--resume", "--run-dir"):
        assert cli.parse_command(["train", "CartPole-v1", option, str(path)]).num_devices == 1
        assert cli.parse_command(["train", "CartPole-v1", option, str(path), "--num-devices", "2"]).num_devices == 2
