"""Tests of error messages for wrong input: commands end with exit code 2, Python calls with a ValueError.

RUN is a run directory; TORN and FOREIGN have another config.json, DAMAGED another metrics.jsonl, UNFINISHED no policy;
FULL is a folder with another file in it, FILE a file.
"""

# ruff: noqa: E501
import contextlib
import io
import pickle
import re
import shlex
import sys
import zipfile

import broken_device_envs as device
import broken_host_envs as host
import numpy as np
import optax
import pytest
from checks import SMALL
from lenient import lenient
from probes import Probe

import jppo
from jppo.actors import numpy_policy
from jppo.cli.main import main

NAMES = {"jppo": jppo, "numpy_policy": numpy_policy, "optax": optax, "host": host, "device": device, "np": np}
# (command or Python expression, part of its error message)
LONG = "x" * 256
CASES = [
    # Command line
    ("jppo fly", "unknown command 'fly'; choose from train, sweep, bench, check-env, eval,"),
    ("jppo trian CartPole-v1", "unknown command 'trian'; did you mean train?"),
    ("jppo learn CartPole-v1", "unknown command 'learn'; jppo.train(env, total_steps=...) trains"),
    ("jppo train", "Missing from jppo train: ENV"),
    ("jppo --json train", "the command must come before the option --json; `jppo --help` lists the commands"),
    ("jppo train CartPole-v1 --num-devices x", "Error parsing --num-devices: "),
    ("jppo train CartPole-v1 --hidden-sizes 64,64", "Error parsing --hidden-sizes: "),
    ("jppo sweep CartPole-v1 --hidden-sizes a,b", "Error parsing --hidden-sizes: "),
    ("jppo sweep CartPole-v1 --sweep-dir FILE", "FILE cannot be written: a file has this name"),
    ("jppo eval RUN --env os:getcwd", "os:getcwd made the str '"),
    ("jppo train CartPol-v1", "unknown environment 'CartPol-v1'; did you mean CartPole-v1?"),
    ("jppo train CartPole-v1 --num-envs 0", "num_envs = 0 must be a whole number of at least 1"),
    (
        "jppo train CartPole-v1 --num-envs 5 --num-steps 8 --num-minibatches 3",
        "num_envs*num_steps = 40 is not divisible by num_minibatches = 3; nearest numbers that divide it: 1, 2, 4, 5, 8",
    ),
    ("jppo train CartPole-v1 --gamma 1.5", "gamma = 1.5 is outside [0, 1]"),
    ("jppo train CartPole-v1 --learning-rate nan", "learning_rate = nan is not a number"),
    ("jppo train CartPole-v1 --clip-eps -0.1", "clip_eps = -0.1 is outside (0, inf)"),
    ("jppo train CartPole-v1 --total-steps -1", "total_steps = -1 must be a whole number of at least 1"),
    ("jppo train CartPole-v1 --num-devices 0", "num_devices = 0 must be a whole number of at least 1"),
    ("jppo train CartPole-v1 --total-steps 1e30", "updates; there must be less than 2**31"),
    ("jppo train CartPole-v1 --seed -1", "seed = -1 must be a whole number from 0 to 4,294,967,295"),
    ("jppo train CartPole-v1 --preset atary", "unknown preset 'atary'; did you mean atari?"),
    ("jppo train CartPole-v1 --lerning-rate 1", "Perhaps you meant: --learning-rate"),
    ("jppo train CartPole-v1 Pendulum-v1", "Unrecognized options: Pendulum-v1"),
    ("jppo train CartPole-v1 --n-envs=2", "jppo: --n-envs: jppo.train calls it num_envs"),
    ("jppo train CartPole-v1 --batch-size 64", "jppo: --batch-size: num_minibatches = num_envs*num_steps/batch_size"),
    ("jppo envs --gpu", "jppo: --gpu: JAX uses a GPU if its GPU build is installed; JAX_PLATFORMS=cpu selects the CPU"),
    ("jppo train CartPole-v1 --ent-coef 1:2:3", "Error parsing --ent-coef: '1:2:3' is not a number or a schedule;"),
    ("jppo train CartPole-v1 --gamma 2:1", "gamma = linear(2, 1) has a value outside its range: 2 is"),
    ("jppo train CartPole-v1 --seed 0.5", "Error parsing --seed: "),
    ("jppo train CartPole-v1 --num-envs 1e-9", "Error parsing --num-envs: "),
    ("jppo train CartPole-v1 --num-envs 10000000000", "num_envs*num_steps = 1,280,000,000,000 must be"),
    ("jppo train CartPole-v1 --num-devices 9", "num_devices = 9; JAX has 8 here"),
    (f"jppo train CartPole-v1 --run-dir {LONG}", "x cannot be written: File name too long"),
    ("jppo train CartPole-v1 --run-dir /dev/null/x", "run_dir /dev/null/x cannot be written"),
    (f"jppo train CartPole-v1 --resume {LONG}", "x/config.json cannot be read: File name too long"),
    (f"jppo plot {LONG}", "x/config.json cannot be read: File name too long"),
    (f"jppo runs {LONG}", "x; name the folder of your runs: jppo runs FOLDER"),
    (
        "jppo train CartPole-v1 --num-devices 3",
        "num_devices = 3 must divide 4, the number of strata of the shuffle for num_envs = 4; set num_strata to a multiple of num_devices that divides num_envs",
    ),
    ("jppo train CartPole-v1 --hidden-sizes 0", "hidden_sizes = 0 must be a whole number from 1 to 16,777,216"),
    ("jppo sweep", "no environment; name at least one"),
    ("jppo sweep CartPole-v2", "unknown environment 'CartPole-v2'; did you mean CartPole-v1"),
    ("jppo sweep Taxi-v4", "Taxi-v4 is a Gymnasium environment; sweep supports JAX environments only"),
    ("jppo sweep CartPole-v1 --ent-coef 0 -0.1:0.1", "ent_coef = linear(-0.1, 0.1) has a value outside"),
    ("jppo sweep CartPole-v1 --learning-rate 1 1", "learning_rate = [1.0, 1.0] must be one value or"),
    ("jppo sweep CartPole-v1 --normalize-obs --seeds 1", "--normalize-obs needs one value, or several"),
    ("jppo sweep CartPole-v1 --total-steps 1e15", "total_steps = 1,000,000,000,000,000 makes"),
    ("jppo sweep CartPole-v1 --pbt-every 5", "--pbt-every and --pbt-fraction need --selection pbt"),
    ("jppo sweep CartPole-v1 --selection pbt", "pbt needs a hyperparameter with several values"),
    ("jppo sweep CartPole-v1 --selection pbt --pbt-fraction 2", "fraction = 2.0 must be a number from 0 to"),
    ("jppo sweep CartPole-v1 --learning-rate", "--learning-rate needs one value, or several values to sweep"),
    ("jppo sweep CartPole-v1 --learning-rate 1e-3,1e-4", "Error parsing --learning-rate: "),
    ("jppo sweep CartPole-v1 --seeds 0", "seeds = 0 must be a whole number from 1 to 100,000"),
    (
        "jppo bench CartPole-v1 --output no/such/folder/bench.png",
        "cannot be written: there is no directory no/such/folder",
    ),
    ("jppo bench CartPole-v1 --seconds 0", "seconds = 0.0 must be a number greater than 0"),
    ("jppo check-env CartPole-v1 --steps 0", "steps = 0 must be a whole number of at least 1"),
    ("jppo eval RUN --num-episodes 0", "num_episodes = 0 must be a whole number of at least 1"),
    # Environments and networks
    ("jppo train HalfCheeta-v5", "unknown environment 'HalfCheeta-v5'; did you mean HalfCheetah-v5?"),
    ("jppo train 'Cart Pole' --backend ray", "unknown environment 'Cart Pole'"),
    ("jppo train ''", "unknown environment ''"),
    ("jppo check-env my_env", "'my_env'; `jppo envs` lists all names; your own environment needs the form module:name"),
    ("jppo train gymnax:CartPole-v1", "gymnax:CartPole-v1: names of gymnax environments have no prefix; use Cart"),
    ("jppo train json:Walk", "json:Walk: module json has no Walk and registers no such environment"),
    ("jppo train os:getcwd", "os:getcwd made an object of type str; it must make a gymnasium.Env"),
    (
        "jppo bench os:getcwd --dry-run",
        "os:getcwd is not the name of a JAX environment; dry_run supports JAX environments only: in Python",
    ),
    ("jppo train nothing:Env", "nothing:Env: there is no module nothing on the Python path"),
    ("jppo train ./walk.py:Env", "./walk.py:Env: write the name of the module, not of its file: walk:Env"),
    ("jppo train math:pi", "math:pi is a float, not a class or function that makes a gymnasium.Env"),
    ("jppo train Taxi-v4 --backend device", "Taxi-v4 is a Gymnasium environment; use backend = 'ray'"),
    ("jppo train Breakout-MinAtar --backend ray", "Breakout-MinAtar is a gymnax environment; use backend = 'device'"),
    ("jppo bench Taxi-v4 --dry-run", "Taxi-v4 is a Gymnasium environment; dry_run supports JAX environments only"),
    (
        "jppo train CartPole-v1 --network cnn",
        'network = "cnn" needs an image [height, width, channels] of at least 3x3; the observation is (4,): use network = "mlp"',
    ),
    ('jppo.train("CartPole-v1", network=object())', "object is not a valid network: it has no method init, apply"),
    (
        'jppo.train("CartPole-v1", network=jppo.networks.actor_critic.ActorCritic)',
        "network = ActorCritic is a class; pass an instance, ActorCritic(...)",
    ),
    (
        'jppo.train("CartPole-v1", optimizer="adam")',
        "optimizer failed (TypeError: 'str' object is not callable); it must be a function of the hyperparameters that returns an optax transformation",
    ),
    (
        "jppo.train(object())",
        "object is not a gymnax environment: it has no reset, step, action_space, observation_space, default_params",
    ),
    (
        'jppo.make_env("CartPole-v1", gravityy=1.0)',
        "unknown parameters gravityy; did you mean gravity? choose from force_mag, gravity,",
    ),
    # Environments of Python
    (
        "jppo.train(host.Sound(), total_steps=1)",
        "Sound is an environment; pass a function that makes a new gymnasium environment",
    ),
    (
        "jppo.train(host.Restarting, total_steps=1)",
        "Restarting needs the arguments env; pass lambda: Restarting(env=...)",
    ),
    ("jppo.train(host.FourValues, total_steps=1)", "FourValues: step returned 4 values ("),
    ("jppo.train(host.OldReset, total_steps=1)", "OldReset: reset returned a ndarray; return obs, info"),
    (
        'jppo.train(type("Other", (host.Sound,), {"step": lambda *_: (np.zeros(3), 0.0, False, False, {})}))',
        "Other: the observation of step does not fit observation_space: observation has",
    ),
    (
        'jppo.train(type("Fifth", (host.FifthCategory,), {"reset": lambda *_, **__: (4, {}), "step": lambda *_: (4, 0.0, False, False, {})}))',
        "Fifth: the observation does not fit observation_space: observation is 4; its space says 0 to 3",
    ),
    ("jppo.train(device.Sound, total_steps=1)", "Sound is a class; pass an instance: Sound()"),
    (
        "jppo.train(lambda: device.Sound(), total_steps=1)",
        "made an object of type Sound; it must make a gymnasium.Env; pass the JAX environment itself",
    ),
    ('jppo.train(lambda: jppo.EpisodicEnv("mine", None, None, None))', "made an object of type EpisodicEnv; it must"),
    ("jppo.make_env(lambda: device.Sound())", "pass the environment that the function makes"),
    ("jppo.train(device.FiveValues(), total_steps=1)", "step returned 5 values; gymnax >= 1.0.1 returns six"),
    (
        "jppo.train(device.OtherShape(), total_steps=1)",
        "observation has shape [2]; its space says [3]; declare the space",
    ),
    # Settings
    ("jppo.PPOConfig(num_envs=-1)", "num_envs = -1 must be a whole number of at least 1"),
    ("jppo.PPOConfig(num_envs=True)", "num_envs = True must be a whole number of at least 1"),
    ('jppo.PPOConfig(activation="gelu")', "activation = 'gelu' is not one of tanh, relu, swish"),
    ("jppo.PPOConfig(hidden_sizes=(64, 0))", "hidden_sizes = 0 must be a whole number from 1 to 16,777,216"),
    ('jppo.train("CartPole-v1", seed="zero")', "seed = 'zero' must be a whole number from 0 to 4,294,967,295"),
    ('jppo.train("CartPole-v1", total_steps=0)', "total_steps = 0 must be a whole number of at least 1"),
    ('jppo.train("CartPole-v1", hyperparams=jppo.Hyperparams(gamma=2.0))', "gamma = 2 is outside [0, 1]"),
    ('jppo.train("CartPole-v1", backend="gpu")', "backend = 'gpu' is not one of auto, device, ray"),
    ('jppo.train("CartPole-v1", progress=1)', "progress = 1 must be 'auto', 'none' or a jppo.Reporter"),
    ('jppo.train("CartPole-v1", run=jppo.RunConfig(wandb=True))', "wandb needs a run_dir"),
    (
        'jppo.sweep("CartPole-v1", learning_rate=[])',
        "learning_rate = [] must be one value or a list of distinct values",
    ),
    ('jppo.check_env("CartPole-v1", num_envs=0)', "num_envs = 0 must be a whole number of at least 1"),
    ("jppo.RayConfig(num_actors=-1)", "num_actors = -1 must be a whole number"),
    ("jppo.RayConfig(num_actors=1.5)", "num_actors = 1.5 must be"),
    ("jppo.RayConfig(num_actors=False)", "num_actors = False must be"),
    ("jppo.RayConfig(num_actors='2')", "num_actors = '2' must be"),
    ("jppo.RayConfig(envs_per_actor=0)", "envs_per_actor = 0 must be a whole number of at least 1"),
    ("jppo.RayConfig(policy_lag=2)", "policy_lag = 2 is not one of 0, 1"),
    ("jppo.RayConfig(policy_lag=None)", "policy_lag = None is not one of 0, 1"),
    ("jppo.RayConfig(actor_cpus=-1.0)", "actor_cpus = -1.0 must be a number of at least 0"),
    ("jppo.RayConfig(actor_cpus=float('nan'))", "actor_cpus = nan must be"),
    ("jppo.RayConfig(actor_gpus=float('inf'))", "actor_gpus = inf must be"),
    ("jppo.RayConfig(actor_timeout=0.0)", "actor_timeout = 0.0 must be more than 0 seconds"),
    ("jppo.RayConfig(actor_timeout=float('nan'))", "actor_timeout = nan must be"),
    ("jppo.RayConfig(max_restarts=-1)", "max_restarts = -1 must be a whole number of at least 0"),
    ("jppo.RayConfig(max_restarts=True)", "max_restarts = True must be"),
    ("jppo.RayConfig(max_restarts=1.5)", "max_restarts = 1.5 must be"),
    ("jppo.RayConfig(actor_cpus='1')", "actor_cpus = '1' must be"),
    ("jppo.RayConfig(actor_gpus=None)", "actor_gpus = None must be"),
    ("jppo.RayConfig(actor_timeout='9')", "actor_timeout = '9' must be"),
    ("jppo.RayConfig(max_restarts='3')", "max_restarts = '3' must be"),
    # Files and run directories
    ("jppo train CartPole-v1 --run-dir FULL", "FULL is not empty; use another directory"),
    ("jppo train CartPole-v1 --run-dir FILE", "FILE cannot be written: a file has this name"),
    ("jppo eval nowhere", "nowhere is not a run directory: it has no config.json"),
    ("jppo eval TORN", "TORN/config.json is damaged: Unterminated string"),
    ("jppo eval FOREIGN", "FOREIGN/config.json is damaged: it has no backend, config, env, hyperparams"),
    ("jppo eval UNFINISHED --best", "UNFINISHED has no policy: its run did not finish and has no checkpoint"),
    ("jppo eval UNFINISHED", "UNFINISHED has no policy: its run did not finish"),
    ("jppo plot DAMAGED", "DAMAGED/metrics.jsonl is damaged: line 1 does not contain the metrics of an update"),
    ("jppo plot RUN --metrics loss/valu", "RUN has no metric 'loss/valu'; did you mean loss/value?"),
    ("jppo plot RUN --x hours", "Expected one of ('steps', 'minutes')"),
    ("jppo runs nowhere", "there is no folder nowhere"),
    ("jppo compare", "no run directory; name at least two"),
    ("jppo compare RUN TORN", "TORN/config.json is damaged: Unterminated string"),
    ("jppo compare RUN FOREIGN", "FOREIGN/config.json is damaged: it has no backend, config, env, hyperparams"),
    ("jppo compare RUN DAMAGED", "DAMAGED/metrics.jsonl is damaged"),
    ("jppo completion csh", "Expected one of ('bash', 'zsh', 'fish')"),
    ("jppo plot RUN --output picture.docx", "output picture.docx must end in .png"),
    ("jppo play nowhere", "nowhere is not a run directory: it has no config.json"),
    ("jppo play RUN --max-steps 0", "max_steps = 0 must be a whole number of at least 1"),
    (
        "jppo export RUN policy.zip",
        "output policy.zip must end in .npz (for NumPy alone) or .stablehlo (for JAX, or any XLA)",
    ),
    ("jppo export RUN no/such/folder/policy.npz", "cannot be written: there is no directory no/such/folder"),
    ('numpy_policy.load("nowhere.npz")', "nowhere.npz cannot be read: No such file or directory"),
    ('numpy_policy.load("text.npz")', "text.npz is damaged or not a policy that jppo exported for NumPy"),
    ('numpy_policy.load("other.npz")', "other.npz is damaged or not a policy that jppo exported for NumPy"),
    ('numpy_policy.load("pickle.npz")', "pickle.npz is damaged or not a policy that jppo exported for NumPy"),
    # Ray
    (
        "jppo train CartPole-v1 --num-actors 2",
        "CartPole-v1 runs on the device, without actors; use backend='ray' (--backend ray) to train with actors",
    ),
    ("jppo train Taxi-v4 --num-actors 3", "num_envs = 16 cannot be spread evenly over num_actors = 3"),
    ("jppo train Taxi-v4 --policy-lag 2", "policy-lag"),
    ("jppo train Taxi-v4 --actor-timeout 0", "actor_timeout = 0.0 must be more than 0 seconds"),
    ("jppo train CartPole-v1 --backend ray --num-actors -1", "num_actors = -1 must be a whole number of at least 0"),
    ("jppo train CartPole-v1 --backend ray --actor-cpus -1", "actor_cpus = -1.0 must be a number of at least 0"),
    (
        "jppo train CartPole-v1 --backend ray --num-actors 1 --address localhost:1",
        "there is no Ray cluster to join at address = 'localhost:1'",
    ),
    ('numpy_policy.load("huge.npz")', "huge.npz is damaged or not a policy"),
    ("jppo export HUGE out.npz", "HUGE/policy_state.npz does not hold the policy"),
    ('jppo.train("CartPole-v1", ray=jppo.RayConfig(policy_lag=2))', "policy_lag = 2 is not one of 0, 1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a run directory and damaged copies of it."""
    path = tmp_path_factory.mktemp("hostile")
    with lenient():
        jppo.train("CartPole-v1", config=SMALL(), total_steps=1, run_dir=path / "RUN")
    for name in ("TORN", "UNFINISHED", "DAMAGED", "FOREIGN", "HUGE"):
        (path / name).mkdir()
        for file in ("config.json", "metrics.jsonl"):
            (path / name / file).write_bytes((path / "RUN" / file).read_bytes())
    (path / "TORN" / "config.json").write_text('{"env": "CartP', encoding="utf-8")
    (path / "DAMAGED" / "metrics.jsonl").write_text("no JSON\n", encoding="utf-8")
    (path / "FOREIGN" / "config.json").write_text("[1, 2]", encoding="utf-8")
    (path / "FULL").mkdir()
    (path / "FULL" / "letter.txt").touch()
    (path / "FILE").touch()
    (path / "text.npz").write_text("no archive", encoding="utf-8")
    np.savez(path / "other.npz", weights=np.zeros(3))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**15,)})
    for file in ("huge.npz", "HUGE/policy_state.npz"):
        with zipfile.ZipFile(path / file, "w") as archive:
            for name in ("weights", "description"):
                archive.writestr(f"{name}.npy", header.getvalue())
    (path / "pickle.npz").write_bytes(pickle.dumps(print))
    return path


def error_of(source: str) -> str:
    """Returns the output of a command that ends with exit code 2, or the message of a ValueError."""
    if not source.startswith("jppo "):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the case has the message
            eval(source, NAMES)
        return str(raised.value)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(shlex.split(source)[1:])
        except SystemExit as ended:
            code = ended.code
    assert code == 2, output.getvalue()
    assert "Traceback" not in output.getvalue()
    return re.sub(r"[│╭╮╰╯─\s]+", " ", output.getvalue())


@pytest.mark.parametrize(("source", "message"), CASES, ids=[source for source, _ in CASES])
def test_wrong_input_gives_a_clear_error(folder, monkeypatch, source, message):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with lenient():
        assert message in error_of(source)
    assert sorted(folder.rglob("*")) == before, "no file is left behind"


@pytest.mark.parametrize("method", ["reset_env", "step_env"])
def test_exit_of_an_environment_is_an_error(method):
    env = type("Exiting", (Probe,), {method: lambda *args: sys.exit(3)})()
    with pytest.raises(RuntimeError, match=r"^the environment called sys\.exit\(3\)$"):
        jppo.train(env, total_steps=1)
    env = type("Exiting", (host.Sound,), {method.removesuffix("_env"): lambda *args, **kwargs: sys.exit(3)})
    with pytest.raises(RuntimeError, match=r"^the environment called sys\.exit\(3\)$"):
        jppo.make_host_env(env)


def test_observations_outside_a_box_warn():
    with pytest.warns(UserWarning, match=r"OutOfBounds: observation has .*, outside \[.*\] of its observation_space"):
        jppo.make_host_env(host.OutOfBounds)
