"""Tests jppo.check_env: correct environments pass; an environment with one fault fails exactly one check."""

import functools
import io
import json
import re

import broken_device_envs as device
import broken_host_envs as host
import gymnasium
import jax
import numpy as np
import pytest
from lenient import lenient

import jppo
from jppo.cli.main import main
from jppo.envs import make_env
from jppo.envs.checks import check_gymnasium as host_checks
from jppo.envs.checks import check_gymnax as device_checks
from jppo.envs.checks.report import FAIL, PASS, Check, CheckReport, print_report
from jppo.envs.checks.trajectory import draw_actions
from jppo.envs.observations import Observations
from jppo.envs.spaces import ActionSpec, ObsSpec

check = functools.partial(jppo.check_env, steps=64, num_envs=4)


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_checks, "_SPEED_SECONDS", 0.01)
        yield


def found(report):
    """Returns the checks that did not pass, with their status; skipped checks are left out."""
    return {check.name: check.status for check in report.checks if check.status not in ("pass", "skipped")}


@pytest.mark.parametrize("env", [device.Sound(), host.Sound, host.vector, host.Sound()])
def test_a_correct_environment_passes_all_checks(env):
    report = check(env)
    assert found(report) == {}
    assert report.passed
    skipped = {check.name for check in report.checks if check.status == "skipped"}
    assert skipped <= {"autoreset", "masks", "seeds"}


@pytest.mark.slow
def test_images_of_bool_are_accepted():
    with lenient():
        report = check("Breakout-MinAtar")
    assert found(report) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "name", "status", "seen"),
    [
        (device.Branching, "jit", "fail", "tracing reset and step raised TracerBoolConversionError"),
        (device.FiveValues, "contract", "fail", "step returned 5 values; gymnax >= 1.0.1 returns six"),
        (device.SixInner, "contract", "fail", "step_env returned 6 values ("),
        (device.NoFinal, "contract", "fail", 'the info of step has no "final_observation"'),
        (device.FloatFlag, "contract", "fail", "terminated is float32[], not bool[]"),
        (device.Flat, "contract", "fail", "reset returned a ShapeDtypeStruct"),
        (device.NoSpaces, "contract", "fail", "it has no action_space, observation_space"),
        (device.Changing, "carry", "fail", "state.time: float32[] after reset, int32[] after step_env"),
        (device.Alone, "vmap", "fail", "running it under vmap and scan raised"),
        (device.Batching, "vmap", "fail", "reward of an environment differs with and without vmap"),
        (device.Gripper, "vmap", "fail", "reward of an environment differs with and without vmap from step 1 on"),
        (device.Chaotic, "vmap", "warn", "states that differ by a factor of 0.999999 have such an effect, too"),
        (device.OtherShape, "spaces", "fail", "observation has shape [2]; its space says [3]"),
        (device.OtherParts, "spaces", "fail", "observation is an array, which does not fit"),
        (device.OutOfBounds, "spaces", "warn", "outside [-0.01, 0.01]"),
        (device.OneAction, "actions", "fail", "there is only one action"),
        (device.Unbounded, "actions", "warn", "1 of 1 dimensions have no bounds"),
        (device.NaNReward, "finite", "fail", "reward nan at step 6"),
        (device.Unseeded, "determinism", "fail", "rewards differ from step 0 on"),
        (device.Certain, "seeds", "warn", "2 seeds with the same actions give the same 64 steps"),
        (device.OneStart, "starts", "fail", "different starts, but all later episodes have the same start"),
        (device.TerminatedByTime, "time_limit", "fail", "max_steps_in_episode = 5, step 5 is terminated; without"),
        (device.DeafToLimit, "time_limit", "warn", "max_steps_in_episode = 5 does not end episodes"),
        (
            device.FinalIsReset,
            "final_obs",
            "fail",
            "the final observation differs from the observation without a limit",
        ),
        (
            device.FinalIsEarlier,
            "final_obs",
            "fail",
            "the final observation differs from the observation without a limit",
        ),
        (device.HiddenReset, "hidden_reset", "fail", "time decreases from"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_fault_of_a_device_environment_fails_exactly_its_check(env, name, status, seen):
    report = check(env())
    assert found(report) == {name: status}
    assert seen in report[name].seen
    assert report[name].advice
    assert report.passed == (status == "warn")


def test_a_redefined_function_is_checked():
    sound = make_env(device.Sound())

    def reset(key):
        return shown(sound.reset(key))

    def shown(returned):
        return returned

    env = sound._replace(reset=reset)
    assert found(check(env)) == {}

    def shown(returned):  # noqa: F811
        return returned[0][:0], returned[1]

    assert found(check(env)) == {"contract": "fail"}


def test_a_class_of_a_device_environment_is_reported():
    report = check(device.Sound)
    assert found(report) == {"contract": "fail"}
    assert (report["contract"].seen, report["contract"].advice) == ("Sound is a class", "pass an instance: Sound()")


def test_final_observations_are_checked_without_a_time_limit(monkeypatch):
    monkeypatch.setattr(device_checks, "_judge_limit", lambda *args: None)
    report = check(device.FinalIsReset())
    assert found(report) == {"final_obs": "fail"}
    assert "equals the first observation of the next episode" in report["final_obs"].seen


@pytest.mark.parametrize(
    ("env", "name", "status", "seen"),
    [
        (host.refuses_to_be_made, "runs", "fail", "ValueError: not today"),
        (host.Raising, "runs", "fail", "raised ZeroDivisionError: division by zero"),
        (host.Exiting, "runs", "fail", "raised SystemExit: 5"),
        (host.ObjectObs, "spaces", "fail", "observation has the dtype object, not numbers"),
        (host.RaggedObs, "spaces", "fail", "observation is not an array: setting an array element with a sequence"),
        (host.Unclosable, "runs", "fail", "it raised RuntimeError: still open"),
        (host.Duck, "contract", "fail", "a Duck was made, not a gymnasium.Env"),
        (host.Unresettable, "runs", "fail", "reset raised ValueError: no observation"),
        (host.Unmakable, "runs", "fail", "making the environment raised RuntimeError: no licence"),
        (host.OldReset, "contract", "fail", "reset returned a ndarray"),
        (host.NoSeed, "contract", "fail", "reset has no parameter seed"),
        (host.FourValues, "contract", "fail", "step returned 4 values (ndarray, float, bool, dict)"),
        (host.IntFlag, "contract", "fail", "terminated is 0, a int, not a bool"),
        (host.ArrayReward, "contract", "fail", "a ndarray, not a number"),
        (host.NoEnv, "contract", "fail", "a NoEnv was made"),
        (host.the_same, "contract", "fail", "the same environment was made twice"),
        (host.OtherShape, "spaces", "fail", "observation has shape [3]; its space says [2]"),
        (host.OutOfBounds, "spaces", "warn", "outside [-0.01, 0.01]"),
        (host.OtherDtype, "spaces", "warn", "observation is float64; its space says float32"),
        (host.LostDigits, "spaces", "fail", "observation is float32; its space says int32"),
        (host.FifthCategory, "spaces", "fail", "observation is 4; its space says 0 to 3"),
        (host.OneAction, "actions", "fail", "there is only one action"),
        (host.Unbounded, "actions", "warn", "1 of 1 dimensions have no bounds"),
        (host.NaNReward, "finite", "fail", "reward nan at step 6"),
        (host.InfiniteObs, "finite", "fail", "observation has inf"),
        (host.Unseeded, "determinism", "fail", "differ from step 0 on"),
        (host.Leaking, "determinism", "fail", "differ from step 0 on"),
        (host.DrawnWhenMade, "determinism", "fail", "in another instance"),
        (host.Certain, "seeds", "warn", "the same actions give the same 256 steps"),
        (host.OneStart, "starts", "fail", "all later episodes have the same start"),
        (host.TerminatedByTime, "time_limit", "warn", "every episode terminates after 10 steps"),
        (host.ResetsItself, "final_obs", "fail", "step calls reset when an episode ends"),
        (host.FinalIsReset, "final_obs", "fail", "is in the region of starts at all"),
        (host.HiddenReset, "hidden_reset", "fail", "step calls reset at step"),
        (host.restarting, "hidden_reset", "fail", "step calls reset at step"),
        (host.HiddenCount, "hidden_reset", "fail", "step_count decreases from"),
        (host.HiddenJump, "hidden_reset", "warn", "the observation jumps to the region of starts"),
        (host.CountedJump, "hidden_reset", "warn", "the observation jumps to the region of starts"),
        (host.next_step, "autoreset", "fail", "autoreset_mode AutoresetMode.NEXT_STEP"),
        (host.forgetful, "autoreset", "fail", "without final_obs in the infos"),
        (host.raising_vector, "runs", "fail", "raised ZeroDivisionError"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_a_fault_of_a_host_environment_fails_exactly_its_check(env, name, status, seen):
    report = check(env, steps=256)
    assert found(report) == {name: status}
    assert seen in report[name].seen
    assert report[name].advice
    assert report.passed == (status == "warn")


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float64),
        gymnasium.spaces.MultiDiscrete([2, 3]),
        gymnasium.spaces.Discrete(2),
    ],
    ids=lambda space: type(space).__name__,
)
def test_host_environments_get_actions_in_the_dtype_of_their_space(space):
    class Strict(host.Sound):
        action_space = space

        def step(self, action):
            assert action.dtype == self.action_space.dtype
            return super().step(action)

    assert found(check(Strict, steps=64)) == {}


def test_the_environment_of_the_caller_is_not_changed():
    env = host.Sound()
    env.close = lambda: pytest.fail("it was closed")
    assert check(gymnasium.make("Taxi-v4")).env == "Taxi-v4"
    report = check(env)
    assert (report.num_envs, report["seeds"].status) == (1, "skipped")
    assert "reset" not in vars(env)


@pytest.mark.parametrize(("name", "backend"), [("CartPole-v1", "device"), ("CartPole-v1", "ray"), ("Taxi-v4", "auto")])
def test_known_environments_pass_all_checks(name, backend):
    with lenient():
        report = check(name, backend=backend)
    assert found(report) == {}
    assert report.env == name


def test_a_made_environment_can_be_checked():
    made = make_env(device.Sound())
    assert found(check(made)) == found(check(made._replace(source=None, params=None))) == {}


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda after: {"reward": after.reward[None]}, "reward is float32[1], not float32[]"),
        (lambda after: {"terminated": after.terminated.astype(int)}, "terminated is int32[], not bool[]"),
        (lambda after: {"reward": jax.random.key(0)}, "reward is key<fry>[], not float32[]"),
        (lambda after: {"active": after.terminated}, "active is not (), but num_agents is 1"),
        (None, "step returned 7 values"),
    ],
)
def test_the_step_of_functions_is_checked(change, seen):
    sound = make_env(device.Sound())

    def step(*arguments):
        after = sound.step(*arguments)
        return after._replace(**change(after)) if change else tuple(after)

    report = check(sound._replace(step=step))
    assert found(report) == {"contract": "fail"}
    assert report["contract"].seen.startswith(seen)


def test_reset_may_return_python_numbers():
    def reset(key):
        return jax.numpy.zeros(1), {"time": 0}

    def step(key, state, action):
        time = state["time"] + 1
        over = time >= 9
        obs = jax.random.normal(key, (1,))
        return jppo.Step(obs, {"time": jax.numpy.where(over, 0, time)}, obs[0], ~over & over, over, obs)

    sound = make_env(device.Sound())
    env = sound._replace(reset=reset, step=step, obs_spec=ObsSpec((1,), "float32"), source=None, params=None)
    report = check(env)
    assert report["vmap"].status == "pass", report["vmap"].seen


def test_rewards_of_functions_may_be_integers():
    sound = make_env(device.Sound())

    def step(*arguments):
        after = sound.step(*arguments)
        return after._replace(reward=jax.numpy.round(after.reward).astype(int))

    assert found(check(sound._replace(step=step))) == {}


def test_parameters_can_be_passed():
    params = device.Sound().default_params.replace(max_steps_in_episode=3)
    seen = check(device.Sound(), params=params)["final_obs"].seen
    assert seen == f"{64 // 3 * 4} final observations belong to the episode that ended"


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("CartPol-v1", {}, "unknown environment 'CartPol-v1'; did you mean CartPole-v1"),
        ("CartPole-v1", {"steps": 0}, "steps = 0 must be a whole number of at least 1"),
        ("CartPole-v1", {"num_envs": True}, "num_envs = True must be a whole number"),
        ("CartPole-v1", {"seed": -1}, "seed = -1 must be"),
        ("Taxi-v4", {"params": 1}, "params apply to on-device environments only"),
        (host.vector(2), {}, "pass a function of num_envs that makes it"),
    ],
)
def test_invalid_arguments_are_refused(env, options, message):
    with pytest.raises(ValueError, match=message):
        check(env, **options)


def test_drawn_actions_cover_the_bounds_and_half_the_environments_share_them():
    spec = ActionSpec(shape=(2,), dtype="float32", low=(-1.0, 0.0), high=(3.0, np.inf))
    actions = draw_actions(spec, 0, 500, 6)
    assert actions.shape == (500, 6, 2)
    assert actions.dtype == np.float32
    assert (actions >= [-1.0, 0.0]).all()
    assert (actions[..., 0] <= 3.0).all()
    assert 0.02 < (actions[..., 0] == 3.0).mean() < 0.1
    assert (actions[:, :3] == actions[:, :1]).all()
    assert (actions[:, 3:] != actions[:, :1]).any(axis=(0, 2)).all()
    discrete = draw_actions(ActionSpec(shape=(), dtype="int64", num_actions=3, start=5), 0, 100, 1)
    assert set(discrete.ravel()) == {5, 6, 7}


def test_recorded_numbers_do_not_keep_large_observations_in_memory():
    observations = Observations(gymnasium.spaces.Box(0, 255, (300, 300), np.uint8), casts=True)
    kept, _ = observations.see(np.zeros((2, 300, 300), np.uint8), (2,))
    assert kept.base is None
    assert kept.shape[0] == 2
    assert kept.shape[1] <= 1024


def test_messages_name_the_observation_leaf():
    space = gymnasium.spaces.Dict(a=gymnasium.spaces.Tuple([gymnasium.spaces.Box(0, 1, (1,)), host.Sound.action_space]))
    observations = Observations(space, casts=True)
    observations.see({"a": (np.full(1, 2.0, np.float32), 2)})
    assert observations.faults == {
        "range": "observation['a'][0] has 2, outside [0, 1]",
        "categories": "observation['a'][1] is 2; its space says 0 to 1",
    }


@pytest.mark.parametrize(("env", "code", "said"), [("Sound", 0, "12 pass, 2 skipped"), ("FourValues", 1, "1 fail")])
def test_the_command_prints_a_report_or_json(capsys, env, code, said):
    words = ["check-env", f"broken_host_envs:{env}", "--steps", "64", "--num-envs", "2"]
    assert main(words) == code
    out = capsys.readouterr().out
    assert said in out
    assert ("step returned 4 values" in " ".join(out.split())) == bool(code)
    assert main([*words, "--json"]) == code
    summary = json.loads(capsys.readouterr().out)
    assert (summary["passed"], summary["backend"], summary["steps"]) == (not code, "ray", 64)
    assert [check["name"] for check in summary["checks"]] == list(host_checks.NAMES)


@pytest.mark.slow
def test_the_name_of_a_gymnax_class_is_checked_on_the_device(capsys):
    words = ["check-env", "broken_device_envs:Sound", "--steps", "64", "--num-envs", "2"]
    assert main([*words, "--backend", "device"]) == 0
    assert "broken_device_envs:Sound (device)" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0  # the backend follows from the class
    assert json.loads(capsys.readouterr().out)["backend"] == "device"


def test_a_raising_environment_shows_its_traceback(capsys):
    assert main(["check-env", "broken_host_envs:Raising", "--num-envs", "1"]) == 1
    assert "return 1 / (10 - self.age)" in capsys.readouterr().out


def test_only_the_results_have_a_colour(monkeypatch):
    checks = (Check("seeds", PASS, "seeds differ"), Check("finite", FAIL, "NaN [x]\x1b]0;", "fix"))
    report = CheckReport(env="E", backend="ray", seed=0, steps=4, num_envs=2, checks=checks)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    print_report(report, stream)
    assert re.findall(r"\x1b\[(?:\d+;)*3\dm(\w+)", stream.getvalue()) == ["pass", "fail"]
    assert r"NaN [x]\x1b]0;" in stream.getvalue()
