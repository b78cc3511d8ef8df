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

import numpy as np
import optax
import pytest
from checks import SMALL
from lenient import lenient

import jppo
from jppo.actors import numpy_policy
from jppo.cli.main import main

# (command or Python expression, part of its error message)
CASES = [
    # Command line
    ("jppo fly", "unknown command 'fly'; choose from train, sweep, plan, bench, check-env, eval,"),
    ("jppo train", "Missing from jppo train: ENV; `jppo train --help` describes the arguments"),
    ("jppo --json train", "the command must come before the option --json; `jppo --help` lists the commands"),
    ("jppo train CartPole-v1 --gamma", "jppo: --gamma needs a value; `jppo train --help`"),
    ("jppo train CartPole-v1 --num-devices x", "Error parsing --num-devices: 'x' is not a whole number; `jppo"),
    ("jppo train CartPole-v1 --stop-at-return x", "Error parsing --stop-at-return: 'x' is not a number; `jppo"),
    ("jppo train CartPole-v1 --checkpoint-seconds x", "Error parsing --checkpoint-seconds: 'x' is not a number; `jppo"),
    (
        "jppo train CartPole-v1 --hidden-sizes 64,64",
        "Error parsing --hidden-sizes: '64,64' is not a whole number; separate several values with spaces; `jppo",
    ),
    (
        "jppo sweep CartPole-v1 --num-envs 8 x",
        "Error parsing --num-envs: 'x' is not a whole number; `jppo",
    ),
    (
        "jppo sweep CartPole-v1 --hidden-sizes a,b",
        "--hidden-sizes: 'a,b' is not a list of layer sizes; write whole numbers with commas",
    ),
    ("jppo sweep CartPole-v1 --sweep-dir FILE", "FILE cannot be written: a file has this name"),
    ("jppo eval RUN --env os:getcwd", "os:getcwd made the str '"),
    ("jppo train CartPol-v1", "unknown environment 'CartPol-v1'; did you mean CartPole-v1?"),
    ("jppo train CartPole-v1 --num-envs 0", "--num-envs 0 must be a whole number of at least 1"),
    (
        "jppo train CartPole-v1 --num-envs 3.5",
        "Error parsing --num-envs: '3.5' is not a whole number; `jppo train --help`",
    ),
    (
        "jppo train CartPole-v1 --num-envs 5 --num-steps 8 --num-minibatches 3",
        "--num-envs * --num-steps = 40 is not divisible by --num-minibatches 3; nearest numbers that divide it: 1, 2, 4, 5, 8",
    ),
    ("jppo train CartPole-v1 --gamma 1.5", "--gamma 1.5 is outside [0, 1]"),
    ("jppo train CartPole-v1 --learning-rate nan", "--learning-rate nan is not a number"),
    ("jppo train CartPole-v1 --clip-eps -0.1", "--clip-eps -0.1 is outside (0, inf)"),
    ("jppo train CartPole-v1 --total-steps -1", "--total-steps -1 must be a whole number of at least 1"),
    ("jppo train CartPole-v1 --total-steps 0.5", "Error parsing --total-steps: '0.5' is not a whole number"),
    ("jppo train CartPole-v1 --num-devices 0", "--num-devices 0 must be a whole number of at least 1"),
    ("jppo train CartPole-v1 --total-steps 1e30", "updates; there must be less than 2**31"),
    ("jppo train CartPole-v1 --seed -1", "--seed -1 must be a whole number from 0 to 4,294,967,295"),
    ("jppo train CartPole-v1 --preset atary", "unknown preset 'atary'; did you mean atari?"),
    ("jppo train CartPole-v1 --lerning-rate 1", "did you mean --learning-rate?"),
    (
        "jppo train CartPole-v1 --num-devices 3",
        "--num-devices 3 must divide 4, the number of strata of the shuffle for --num-envs 4; set --num-strata to a multiple of --num-devices that divides --num-envs",
    ),
    ("jppo train CartPole-v1 --hidden-sizes 0", "--hidden-sizes 0 must be a whole number from 1 to 16,777,216"),
    ("jppo sweep", "no environment; name at least one"),
    ("jppo sweep CartPole-v1 --learning-rate", "--learning-rate needs one value, or several values to sweep"),
    ("jppo sweep CartPole-v1 --learning-rate 1e-3,1e-4", "or warmup:0.1:3e-4; separate several values with spaces"),
    ("jppo sweep CartPole-v1 --seeds 0", "--seeds 0 must be a whole number from 1 to 100,000"),
    (
        "jppo bench CartPole-v1 --output no/such/folder/bench.png",
        "cannot be written: there is no directory no/such/folder",
    ),
    ("jppo plan CartPole-v1 --seconds 0", "unknown option --seconds"),
    ("jppo bench CartPole-v1 --seconds 0", "--seconds 0.0 must be a number greater than 0"),
    ("jppo check-env CartPole-v1 --steps 0", "--steps 0 must be a whole number of at least 1"),
    ("jppo eval RUN --num-episodes 0", "--num-episodes 0 must be a whole number of at least 1"),
    # Environments and networks
    ("jppo train HalfCheeta-v5", "unknown environment 'HalfCheeta-v5'; did you mean HalfCheetah-v5?"),
    ("jppo train nothing:Env", "nothing:Env: there is no module nothing on the Python path"),
    ("jppo train ./walk.py:Env", "./walk.py:Env: write the name of the module, not of its file: walk:Env"),
    ("jppo train math:pi", "math:pi is a float, not a class or function that makes a gymnasium.Env"),
    ("jppo train Taxi-v4 --backend device", "Taxi-v4 is a Gymnasium environment; use --backend 'ray'"),
    (
        "jppo train Breakout-MinAtar --backend ray",
        "Breakout-MinAtar is a gymnax environment; use --backend 'device'",
    ),
    ("jppo plan Taxi-v4", "Taxi-v4 is a Gymnasium environment; plan supports JAX environments only"),
    (
        "jppo train CartPole-v1 --network cnn",
        '--network "cnn" needs an image [height, width, channels] of at least 3x3; the observation is (4,): use --network "mlp"',
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
    ('jppo.train("CartPole-v1", optimizer=lambda h: optax.adam(1e-3))', "optimizer goes uphill"),
    (
        "jppo.train(object())",
        "object is not a gymnax environment: it has no reset, step, action_space, observation_space, default_params",
    ),
    (
        'jppo.make_env("CartPole-v1", gravityy=1.0)',
        "unknown parameters gravityy; did you mean gravity? choose from force_mag, gravity,",
    ),
    # Python
    ("jppo.PPOConfig(num_envs=-1)", "num_envs = -1 must be a whole number of at least 1"),
    ("jppo.PPOConfig(num_envs=True)", "num_envs = True must be a whole number of at least 1"),
    ('jppo.PPOConfig(activation="gelu")', "activation = 'gelu' is not one of tanh, relu, swish"),
    ("jppo.PPOConfig(hidden_sizes=(64, 0))", "hidden_sizes = 0 must be a whole number from 1 to 16,777,216"),
    ('jppo.train("CartPole-v1", seed="zero")', "seed = 'zero' must be a whole number from 0 to 4,294,967,295"),
    ('jppo.train("CartPole-v1", total_steps=0)', "total_steps = 0 must be a whole number of at least 1"),
    ('jppo.train("CartPole-v1", hyperparams=jppo.Hyperparams(gamma=2.0))', "gamma = 2 is outside [0, 1]"),
    ('jppo.train("CartPole-v1", backend="gpu")', "backend = 'gpu' is not one of auto, device, ray"),
    ('jppo.train("CartPole-v1", progress=False)', "progress = False must be 'auto', 'none' or a jppo.Reporter"),
    ('jppo.train("CartPole-v1", run=jppo.RunConfig(wandb=True))', "wandb needs a run_dir"),
    (
        'jppo.sweep("CartPole-v1", learning_rate=[])',
        "learning_rate = [] must be one value or a list of distinct values",
    ),
    ('jppo.check_env("CartPole-v1", num_envs=0)', "num_envs = 0 must be a whole number of at least 1"),
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
    (
        "jppo plot RUN --x hours",
        "invalid choice 'hours' for argument '--x'. Expected one of ('steps', 'minutes'); `jppo plot",
    ),
    ("jppo runs nowhere", "there is no folder nowhere"),
    ("jppo compare", "no run directory; name at least two"),
    ("jppo compare RUN TORN", "TORN/config.json is damaged: Unterminated string"),
    ("jppo compare RUN FOREIGN", "FOREIGN/config.json is damaged: it has no backend, config, env, hyperparams"),
    ("jppo compare RUN DAMAGED", "DAMAGED/metrics.jsonl is damaged"),
    ("jppo report RUN DAMAGED", "DAMAGED/metrics.jsonl is damaged"),
    ("jppo report RUN --output report.pdf", "output report.pdf must end in .html"),
    ("jppo report RUN --output no/such/report.html", "cannot be written: there is no directory no/such"),
    (
        "jppo completion csh",
        "invalid choice 'csh' for argument 'shell'. Expected one of ('bash', 'zsh', 'fish'); `jppo",
    ),
    ("jppo plot RUN --output picture.docx", "output picture.docx must end in .png"),
    ("jppo play nowhere", "nowhere is not a run directory: it has no config.json"),
    ("jppo play RUN --max-steps 0", "--max-steps 0 must be a whole number of at least 1"),
    (
        "jppo export RUN policy.zip",
        "output policy.zip must end in .npz (for NumPy alone) or .stablehlo (for JAX, or any XLA)",
    ),
    ("jppo export RUN no/such/folder/policy.npz", "cannot be written: there is no directory no/such/folder"),
    ('numpy_policy.load("nowhere.npz")', "nowhere.npz cannot be read: No such file or directory"),
    (
        'numpy_policy.load("text.npz")',
        "text.npz is damaged or not a policy that jppo exported for NumPy",
    ),
    ('numpy_policy.load("other.npz")', "other.npz is damaged or not a policy that jppo exported for NumPy"),
    ('numpy_policy.load("pickle.npz")', "pickle.npz is damaged or not a policy that jppo exported for NumPy"),
    # Ray
    (
        "jppo train CartPole-v1 --num-actors 2",
        "CartPole-v1 runs on the device, without actors; use backend='ray' (--backend ray) to train with actors",
    ),
    ("jppo train CartPole-v1 --backend ray --num-actors -1", "--num-actors -1 must be a whole number of at least 0"),
    ("jppo train CartPole-v1 --backend ray --actor-cpus -1", "--actor-cpus -1.0 must be a number of at least 0"),
    (
        "jppo train CartPole-v1 --backend ray --num-actors 1 --address localhost:1",
        "there is no Ray cluster to join at --address 'localhost:1'",
    ),
    ('jppo.train("CartPole-v1", ray=jppo.RayConfig(policy_lag=2))', "policy_lag = 2 is not one of 0, 1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a run directory and damaged copies of it."""
    path = tmp_path_factory.mktemp("hostile")
    with lenient():
        jppo.train("CartPole-v1", config=SMALL(), total_steps=1, run_dir=path / "RUN")
    for name in ("TORN", "UNFINISHED", "DAMAGED", "FOREIGN"):
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
    (path / "pickle.npz").write_bytes(pickle.dumps(print))
    return path


def error_of(source: str) -> str:
    """Returns the output of a command that ends with exit code 2, or the message of a ValueError."""
    if not source.startswith("jppo "):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the case has the message
            eval(source, {"jppo": jppo, "numpy_policy": numpy_policy, "optax": optax})
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
