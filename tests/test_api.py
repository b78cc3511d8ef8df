"""Tests the public names of `jppo`, the display of results, and the arguments of `jppo.evaluate`."""

import asyncio
import base64
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lenient import lenient, lenient_env
from PIL import Image

import jppo
from jppo.training.settings import RunSettings, describe_start, prepare_run

ROOT = Path(__file__).parents[1]
SIZES = {"num_envs": 4, "num_steps": 16, "hidden_sizes": (8,), "num_devices": 1, "total_steps": 128}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with lenient():
        return jppo.train("CartPole-v1", run_dir=tmp_path_factory.mktemp("api") / "run", **SIZES)


def test_every_public_name_is_listed_and_loads():
    assert set(jppo.__all__) <= set(dir(jppo))
    assert all(getattr(jppo, name) is not None for name in jppo.__all__)


def test_submodules_load_on_access():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "jppo/training/train.py"]
    text = "".join(page.read_text() for page in pages)
    names = {*re.findall(r"\bjppo\.(\w+)\.\w+", text), "errors", "config", "ppo"}
    packages = {name for name in names if (ROOT / f"jppo/{name}").is_dir() or (ROOT / f"jppo/{name}.py").exists()}
    code = f"import jppo; print([getattr(jppo, name).__name__ for name in {sorted(packages)}])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == repr([f"jppo.{name}" for name in sorted(packages)])
    with pytest.raises(AttributeError, match="module 'jppo' has no attribute 'frobnicate'"):
        _ = jppo.frobnicate


@pytest.mark.slow
def test_results_have_a_short_repr_and_a_table_in_notebooks(result):
    with lenient():
        swept = jppo.sweep("CartPole-v1", seeds=1, learning_rate=[1e-4, 1e-3], **SIZES)
        shown = [result, result.policy, jppo.evaluate(result, num_episodes=2), swept]
        shown += [
            jppo.bench("CartPole-v1", num_envs=4, dry_run=True),
            jppo.bench("CartPole-v1", seconds=1e-3, num_envs=4),
        ]
    for one in shown:
        assert re.fullmatch(rf"{type(one).__name__}\(.*\)", repr(one))
        assert len(repr(one)) < 400
        assert one._repr_html_().startswith(f"<table><caption>{type(one).__name__}")
    assert "learning_rate=0.001" in swept._repr_html_()


@pytest.mark.slow
def test_evaluate_accepts_results_and_run_directories(result):
    with lenient():
        returns = jppo.evaluate(result.agent.env, result.policy, num_episodes=4).returns
        for arguments in (
            (result,),
            (result.policy,),
            (jppo.load_policy(result.run_dir),),
            (result.run_dir,),
            (str(result.run_dir),),
            ("CartPole-v1", result.policy),
            ("CartPole-v1", result),
            (result, str(result.run_dir)),
        ):
            np.testing.assert_array_equal(jppo.evaluate(*arguments, num_episodes=4).returns, returns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("CartPole-v1",), "CartPole-v1 is not a run directory"),
        ((7,), "env_or_run is a int; it must be a result of"),
        (("CartPole-v1", 7), "policy is a int; it must be a result of"),
    ],
)
def test_evaluate_refuses_other_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        jppo.evaluate(*arguments)


@pytest.mark.slow
def test_notebooks_show_the_plot_of_a_result(result, tmp_path):
    picture = result.plot(metrics=["episode/return_mean", "loss/value"], x="minutes")
    shown = re.fullmatch(
        r'<img src="data:image/png;base64,(.*)" alt="CartPole-v1: (.*) over minutes">', picture._repr_html_()
    )
    assert base64.b64decode(shown[1]) == picture.data
    with Image.open(io.BytesIO(picture.data)) as image:
        assert (image.format, image.size[0]) == ("PNG", 1584)
    assert len(repr(picture)) < 100
    picture.save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == picture.data
    with pytest.raises(ValueError, match=r"must end in \.png"):
        picture.save(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="the run has no metric 'loss/valu'; did you mean loss/value"):
        result.plot(metrics=["loss/valu"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from drawing packages
def test_play_shows_an_episode(result):
    with lenient():
        picture = jppo.play(result, max_steps=3)
    assert picture.description == "CartPole-v1: 3 steps, return 3.0"
    assert picture._repr_html_().startswith('<img src="data:image/gif;base64,')
    with Image.open(io.BytesIO(picture.data)) as film:
        assert film.format == "GIF"
    own = jppo.TrainedPolicy(result.policy.policy, result.policy.state)
    with pytest.raises(ValueError, match=r"this TrainedPolicy has no environment; use jppo\.play\(env, policy\)"):
        own.play()
    with lenient():
        assert own.play(result.agent.env, max_steps=3) == picture


def test_a_policy_can_be_pickled(result):
    policy = pickle.loads(pickle.dumps(result.policy))
    obs = np.random.default_rng(0).normal(size=(64, 4))
    for given in ({}, {"sampled": True, "seed": 1}):
        np.testing.assert_array_equal(policy.act(obs, **given), result.policy.act(obs, **given))
    np.testing.assert_array_equal(policy.value(obs), result.policy.value(obs))
    assert policy.env is None
    assert repr(policy) == repr(result.policy)


def test_the_status_is_that_of_the_summary(result):
    assert result.status == result.summary["status"] == "finished"


def test_training_works_in_a_running_event_loop(tmp_path, result):
    """As in a notebook, with checkpoints, because orbax uses asyncio."""

    async def train():
        return jppo.train("CartPole-v1", run_dir=tmp_path / "run", **SIZES)

    with lenient():
        trained = asyncio.run(train())
    assert trained.summary["policy_sha256"] == result.summary["policy_sha256"]
    assert trained.summary["checkpoint"] == trained.summary["updates"] == 2


def test_a_cell_of_a_notebook_shows_pictures(result):
    """A cell runs in an asyncio loop, and the notebook shows the value of its last line."""
    scope = {"result": result}

    async def run_cell(source):
        return eval(source, scope)._repr_html_()

    with lenient():
        curve = asyncio.run(run_cell("result.plot()"))
        episode = asyncio.run(run_cell("result.policy.play(max_steps=3)"))
    assert curve.startswith('<img src="data:image/png;base64,')
    assert episode.startswith('<img src="data:image/gif;base64,')
    assert 'alt="CartPole-v1: 3 steps, return 3.0"' in episode


def start_line(env, **arguments):
    return describe_start(prepare_run(RunSettings(env=env, num_devices=1, **arguments)))


def test_the_start_line_shows_sizes_and_differences_to_the_preset():
    env = lenient_env("CartPole-v1")
    sizes = "num_envs = 4, num_steps = 128\n  1 device, preset cleanrl-classic"
    assert start_line(env, total_steps=3000) == f"CartPole-v1: 3,072 steps, {sizes}"  # six whole updates
    line = start_line(env, overrides={"gamma": 0.5})
    assert line == f"CartPole-v1: 500,224 steps, {sizes}\n  with gamma = 0.5 (preset: 0.99)"
    assert start_line(env, config=jppo.PPOConfig()) == (
        "CartPole-v1: 507,904 steps, num_envs = 64, num_steps = 128\n  1 device, preset cleanrl-classic\n  with "
        "num_envs = 64 (preset: 4)"
    )
    ray = jppo.RayConfig(num_actors=2, envs_per_actor=4)
    assert start_line("CartPole-v1", backend="ray", ray=ray) == (
        "CartPole-v1: 500,736 steps, num_envs = 8, num_steps = 128\n  2 actors of 4 environments, 1 device, "
        "preset cleanrl-classic\n  with num_envs = 8 (preset: 4)"
    )


def test_presets_apply_to_all_versions():
    preset_for = jppo.config.presets.preset_for
    assert preset_for("HalfCheetah-v4") == preset_for("HalfCheetah-v5") == "mujoco"
    assert preset_for("Pendulum-v0") == "pendulum"
    assert preset_for("Pendulum") == "pendulum"
    assert preset_for("HalfCheetah-v4x") == "default"


def test_presets_apply_to_ids_with_a_module():
    preset_for = jppo.config.presets.preset_for
    assert preset_for("envpool:HalfCheetah-v4") == preset_for("gymnasium_robotics:HalfCheetah-v4") == "mujoco"
    assert preset_for("mine:Pendulum") == "default"  # a class
    assert preset_for("jumanji:Snake-v1") == "jumanji"
    assert preset_for("craftax:Craftax-Symbolic-v1") == "craftax"
    assert preset_for("navix:CartPole-v1") == "navix"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("atari:Pong-v5", "atari"),
        ("envpool:Breakout-v5", "atari"),
        ("ALE/Tetris-v5", "atari"),
        ("PongNoFrameskip-v4", "atari"),
        ("ale_py:FroggerDeterministic-v4", "atari"),
        ("envpool:HalfCheetah-v5", "mujoco"),
        ("envpool:Tetris-v0", "default"),
        ("mine:Tetris-v0", "default"),
        ("Pong-ram-v0", "default"),
        ("Pong-misc", "default"),
        ("LunarLander-v3", "lunarlander"),
        ("minigrid:MiniGrid-DoorKey-5x5-v0", "minigrid"),
        ("pettingzoo:mpe/simple_spread_v3", "mpe"),
        ("pettingzoo:sisl/multiwalker-v9", "pettingzoo"),
    ],
)
def test_presets_of_host_families(name, preset):
    assert jppo.config.presets.preset_for(name) == preset
