"""Tests the adapters of environment families: each trap of each family. A family that is not installed is skipped."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from subprocess import CalledProcessError
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lenient import lenient

import jppo
from jppo.config.families import FAMILIES
from jppo.envs import families, make_env
from jppo.envs.backends import choose_backend
from jppo.envs.masks import has_mask, legal_categories

IDS = {
    "brax": "brax:inverted_pendulum",
    "craftax": "craftax:Craftax-Classic-Symbolic-v1",
    "jumanji": "jumanji:Snake-v1",
    "navix": "navix:Navix-Empty-Random-8x8-v0",
    "playground": "playground:CartpoleBalance",
    "xminigrid": "xminigrid:MiniGrid-DoorKey-5x5",
}


pytestmark = pytest.mark.filterwarnings("default")  # of the families


@pytest.fixture(autouse=True)
def allow_promotion():
    """The families do not support JAX's strict modes."""
    with lenient():
        yield


def need(family):
    if not families.is_installed(family):  # importorskip would import MuJoCo before its backend is chosen
        pytest.skip(f"{FAMILIES[family]} is not installed")


def play(env, num_steps, num_envs=3, action=None):
    """Returns the first observations [N, ...] and the steps [T, N, ...] of a batch with random or constant actions."""

    def step(carry, key):
        obs, state = carry
        act_key, step_key = jax.random.split(key)
        chosen = choose(env, act_key, obs, num_envs) if action is None else jnp.full(num_envs, action)
        after = jax.vmap(env.step)(jax.random.split(step_key, num_envs), state, chosen)
        return (after.obs, after.state), after._replace(state=after.state.time)

    @jax.jit
    def run(key):
        reset_key, key = jax.random.split(key)
        obs, state = jax.vmap(env.reset)(jax.random.split(reset_key, num_envs))
        return obs, jax.lax.scan(step, (obs, state), jax.random.split(key, num_steps))[1]

    return jax.device_get(run(jax.random.key(0)))


def choose(env, key, obs, num_envs):
    spec = env.action_spec
    if spec.num_actions:
        logits = jnp.zeros((num_envs, spec.num_actions))
        if has_mask(env.obs_spec):
            logits = jnp.where(legal_categories(spec, obs["action_mask"]), logits, -jnp.inf)
        return jax.random.categorical(key, logits)
    return jax.random.uniform(key, (num_envs, *spec.shape), minval=-1.0)


def first_leaf(tree):
    return jax.tree.leaves(tree)[0]


@pytest.mark.parametrize("family", IDS)
@pytest.mark.slow
def test_the_limit_truncates_and_the_next_episode_starts_anew(family):
    need(family)
    env = make_env(IDS[family], max_steps_in_episode=2)
    first, steps = play(env, 4)
    kept = ~steps.terminated[0] & ~steps.terminated[1]
    assert kept.any()
    assert steps.truncated[1][kept].all()
    assert not (steps.truncated & steps.terminated).any()
    for leaf, final in zip(jax.tree.leaves(steps.obs), jax.tree.leaves(steps.final_obs), strict=True):
        assert np.array_equal(leaf[0][kept], final[0][kept])  # within an episode
    assert not all(
        np.array_equal(start[kept], leaf[1][kept])
        for start, leaf in zip(jax.tree.leaves(first), jax.tree.leaves(steps.obs), strict=True)
    ), "reuses the first state"


@pytest.mark.parametrize("family", IDS)
@pytest.mark.slow
def test_check_env_passes(family):
    need(family)
    report = jppo.check_env(IDS[family], steps=64, num_envs=4)
    assert report.passed, [(check.name, check.seen) for check in report.checks if check.status == "fail"]


@pytest.mark.parametrize("family", [family for family in IDS if family != "jumanji"])
@pytest.mark.slow
def test_an_episode_can_be_drawn(family):
    need(family)
    env = make_env(IDS[family])
    state = jax.jit(env.reset)(jax.random.key(0))[1]
    try:
        image = np.asarray(env.source.render(jax.device_get(state).env_state))
    except Exception as error:
        if family in ("brax", "playground"):
            pytest.skip(f"MuJoCo cannot draw here: {error}")
        raise
    assert image.ndim == 3
    assert image.shape[2] == 3
    assert image.dtype == np.uint8
    assert image.std() > 1


def test_xland_warns_without_a_rule_set():
    need("xminigrid")
    with pytest.warns(
        UserWarning, match=r"^xminigrid:XLand-MiniGrid-R1-9x9 has no goal and no rewards without a rule set; pass"
    ):
        make_env("xminigrid:XLand-MiniGrid-R1-9x9")


@pytest.mark.slow
def test_names_lead_to_a_trained_policy(tmp_path):
    need("jumanji")
    result = jppo.train("jumanji:Snake-v1", num_envs=8, num_steps=8, total_steps=128, run_dir=tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert jppo.evaluate(tmp_path / "run", num_episodes=2, max_steps=64).returns.shape == (2,)


@pytest.mark.slow
def test_craftax_death_terminates_and_time_does_not():
    need("craftax")
    env = make_env(IDS["craftax"], max_steps_in_episode=50)
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    _, state = reset(jax.random.key(0))
    dying = state._replace(
        env_state=state.env_state.replace(player_health=jnp.zeros_like(state.env_state.player_health))
    )
    assert step(jax.random.key(1), dying, jnp.int32(0)).terminated
    late = state._replace(env_state=state.env_state.replace(timestep=jnp.int32(20_000)))
    after = step(jax.random.key(1), late, jnp.int32(0))
    assert not after.terminated
    assert not after.truncated
    after = step(jax.random.key(1), state._replace(time=jnp.int32(49)), jnp.int32(0))
    assert after.truncated
    assert not after.terminated


@pytest.mark.slow
def test_craftax_pixels_need_one_byte():
    need("craftax")
    env = make_env("craftax:Craftax-Classic-Pixels-v1", pool=1)
    assert env.obs_spec.dtype == "uint8"
    obs, _ = jax.jit(env.reset)(jax.random.key(0))
    assert int(obs.max()) > 100


@pytest.mark.slow
def test_playground_hides_the_privileged_state():
    need("playground")
    from jppo.envs.families.physics import episodic_env
    from jppo.envs.families.playground import select_observation

    obs = {"state": jnp.zeros(3), "privileged_state": jnp.ones(5)}
    assert select_observation(False)(obs).shape == (3,)
    assert set(select_observation(True)(obs)) == set(obs)
    assert select_observation(False)(jnp.zeros(3)).shape == (3,)

    class Repeated:
        action_size = 1

        def reset(self, key):
            return State(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()))

        def step(self, state, action):
            return State(state.obs + 1, jnp.ones(()), jnp.zeros(()))

    class State(NamedTuple):
        obs: jax.Array
        reward: jax.Array
        done: jax.Array

    env = episodic_env("repeated", Repeated(), 4, lambda obs: obs, None)
    obs, _, reward, _, _ = env.step(jax.random.key(0), env.reset(jax.random.key(0))[1], jnp.zeros(1))
    assert (float(obs[0]), float(reward)) == (4.0, 4.0)


@pytest.mark.parametrize("name", ["xminigrid:MiniGrid-Empty-5x5", "navix:Navix-Empty-5x5-v0"])
@pytest.mark.slow
def test_grids_are_one_hot(name):
    need(name.partition(":")[0])
    env = make_env(name, max_steps_in_episode=5)
    first, steps = play(env, 8)
    assert env.obs_spec.dtype == "bool"
    for obs in (first, steps.obs, steps.final_obs):
        channels = 2 if name.startswith("xmini") else 3
        np.testing.assert_array_equal(obs.sum(-1), channels)  # each integer was in its range


@pytest.mark.slow
def test_xminigrid_goals_terminate_and_the_reward_uses_the_limit():
    need("xminigrid")
    env = make_env(IDS["xminigrid"], max_steps_in_episode=10)
    _, state = env.reset(jax.random.key(0))
    step, rewards = jax.jit(env.step), []
    goal = np.argwhere(np.asarray(state.env_state.state.grid)[..., 0] == 6)[0]
    agent = state.env_state.state.agent
    next_to_goal = agent.replace(position=jnp.array([goal[0], goal[1] - 1]), direction=jnp.asarray(1))
    moved = state.env_state.replace(state=state.env_state.state.replace(agent=next_to_goal))
    after = step(jax.random.key(1), state._replace(env_state=moved), jnp.int32(0))
    rewards.append(float(after.reward))
    assert after.terminated
    assert not after.truncated
    assert rewards[0] == pytest.approx(1 - 0.9 / 10)


@pytest.mark.slow
def test_navix_has_no_ghost_step_and_no_images_in_its_state():
    need("navix")
    env = make_env("navix:Navix-Empty-5x5-v0", max_steps_in_episode=3)
    _, state = env.reset(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.env_state)) < 1000
    _, steps = play(env, 6, action=2)
    np.testing.assert_array_equal(steps.state[:, 0], [1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(steps.final_obs[0], steps.final_obs[3])  # the first action of an episode counts


@pytest.mark.parametrize("limit", [5, 9])
@pytest.mark.slow
def test_navix_goals_terminate(limit):
    """The fifth step reaches the goal. At a limit of 5, Navix reports a termination, too."""
    need("navix")
    from navix.environments.environment import StepType

    assert (int(StepType.TRUNCATION), int(StepType.TERMINATION)) == (1, 2)
    env = make_env("navix:Navix-Empty-5x5-v0", max_steps_in_episode=limit)
    step, state, steps = jax.jit(env.step), env.reset(jax.random.key(0))[1], []
    forward, right = 2, 1
    for action in (forward, forward, right, forward, forward):
        before = state
        steps.append(step(jax.random.key(1), state, jnp.int32(action)))
        state = steps[-1].state
    assert [bool(after.terminated) for after in steps] == [False] * 4 + [True]
    assert not any(after.truncated for after in steps)
    assert [float(after.reward) for after in steps] == [0.0] * 4 + [1.0]
    assert state.time == 0
    assert env.source.step(jax.random.key(1), before.env_state, jnp.int32(forward))[1].step_type == 2


@pytest.mark.slow
def test_navix_limits_truncate():
    """Navix reports the truncation itself, even if the adapter's clock is at 0."""
    need("navix")
    env = make_env("navix:Navix-Empty-5x5-v0", max_steps_in_episode=5)
    _, state = env.reset(jax.random.key(0))
    late = state._replace(env_state=state.env_state.replace(t=jnp.asarray(4)))
    assert env.source.step(jax.random.key(1), late.env_state, jnp.int32(0))[1].step_type == 1
    for at_limit in (late, state._replace(time=jnp.int32(4))):
        after = jax.jit(env.step)(jax.random.key(1), at_limit, jnp.int32(0))
        assert after.truncated
        assert not after.terminated


@pytest.mark.parametrize("name", ["Connector-v3", "LevelBasedForaging-v0"])
@pytest.mark.slow
def test_truncations_that_jumanji_reports_stay_truncations(name):
    """Only these two environments report truncations: discounts are not 0 in their last step."""
    need("jumanji")
    env = make_env(f"jumanji:{name}", max_steps_in_episode=10)
    step, action = jax.jit(env.step), jnp.zeros(env.action_spec.shape, jnp.int32)
    _, state = env.reset(jax.random.key(0))

    def change(**fields):
        return state._replace(env_state=dataclasses.replace(state.env_state, **fields))

    def finish(number):
        """Returns a state in which this number of agents is connected, or of pieces of food is eaten."""
        if name == "Connector-v3":
            agents = state.env_state.agents
            chosen = jnp.arange(len(agents.id)) < number
            ends = jnp.where(chosen[:, None], agents.target, agents.position)
            return {"agents": dataclasses.replace(agents, position=ends)}
        food = state.env_state.food_items
        return {"food_items": dataclasses.replace(food, eaten=jnp.arange(len(food.id)) < number)}

    last = jnp.int32(10)  # the adapter moves Jumanji's limit to 11
    for at_limit in (change(step_count=last), change(step_count=last, **finish(1)), state._replace(time=jnp.int32(9))):
        after = step(jax.random.key(1), at_limit, action)
        assert after.truncated
        assert not after.terminated
    for finished in (change(**finish(100)), change(step_count=last, **finish(100))):
        after = step(jax.random.key(1), finished, action)
        assert after.terminated
        assert not after.truncated
    assert not step(jax.random.key(1), change(**finish(1)), action).terminated


@pytest.mark.slow
def test_jumanji_time_limits_truncate():
    need("jumanji")
    env = make_env("jumanji:Maze-v0")
    assert env.params.max_steps_in_episode == 100
    _, steps = play(env, 101)
    assert steps.truncated[99].any()
    assert not steps.terminated[99].all()


@pytest.mark.slow
def test_jumanji_states_stay_small_with_a_time_limit():
    need("jumanji")
    _, state = jax.eval_shape(make_env("jumanji:MMST-v0").reset, jax.random.key(0))
    assert state.env_state.connected_nodes.shape == (3, 71)  # an entry for each step


@pytest.mark.slow
def test_search_and_rescue_rewards_decrease_until_the_time_limit():
    need("jumanji")
    env = make_env("jumanji:SearchAndRescue-v0", max_steps_in_episode=10, target_contact_range=1.0)
    state = env.reset(jax.random.key(0))[1]
    step, action = jax.jit(env.step), jnp.zeros(env.action_spec.shape)
    early = step(jax.random.key(1), state, action)
    later = state._replace(env_state=state.env_state.replace(step=jnp.int32(5)))
    late = step(jax.random.key(1), later, action)
    assert early.reward > 0
    np.testing.assert_allclose(late.reward, early.reward / 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "jumanji:Sokoban-v0",
            FileNotFoundError("no connection\nto the hub"),
            r"\(no connection\); .* network connection$",
        ),
        ("playground:Go1Getup", CalledProcessError(128, ["git"]), r"\(.* status 128\); .* network connection and git$"),
    ],
)
def test_failed_downloads_are_reported(monkeypatch, name, error, message):
    raise_in_adapter(monkeypatch, name, error)
    with pytest.raises(ValueError, match=f"{name} could not be made, .* missing {message}"):
        make_env(name)
    with pytest.raises(ValueError, match=rf"{name} could not be made"):  # not a failed check
        jppo.check_env(name)


def test_errors_of_packages_name_the_environment(monkeypatch):
    error = TypeError("clip() got an unexpected keyword argument 'a_min'")
    raise_in_adapter(monkeypatch, "brax:swimmer", error)
    with pytest.raises(
        ValueError, match=r"^brax:swimmer cannot be made \(TypeError: clip\(\) got .* 'a_min'\)$"
    ) as raised:
        make_env("brax:swimmer")
    assert raised.value.__cause__ is error


def raise_in_adapter(monkeypatch, name, error):
    """Replaces the adapters by one that has this environment and raises this error."""

    def make(name):
        raise error

    adapter = types.SimpleNamespace(make=make, names=lambda: [name.partition(":")[2]])
    monkeypatch.setattr(families, "is_installed", lambda family: True)
    monkeypatch.setattr(families, "_adapter", lambda family: adapter)


@pytest.mark.parametrize(
    ("name", "option"), [("jumanji:Snake-v1", "rows"), ("playground:CartpoleBalance", "episode_len")]
)
@pytest.mark.slow
def test_unknown_options_are_reported(name, option):
    need(name.partition(":")[0])
    with pytest.raises(ValueError, match=f"{name} cannot be made with the options {option} .*{option}"):
        make_env(name, **{option: 3})


@pytest.mark.slow
def test_invalid_options_are_reported():
    need("jumanji")
    with pytest.raises(ValueError, match=r"jumanji:Snake-v1 cannot be made with the options num_rows \(.*index is out"):
        make_env("jumanji:Snake-v1", num_rows=0, max_steps_in_episode=9)


@pytest.mark.slow
def test_playground_limits_count_actions():
    need("playground")
    env = make_env(IDS["playground"], episode_length=10, action_repeat=3)
    assert env.params.max_steps_in_episode == 4  # Brax's wrapper ends the episode after 12 simulated steps, too


@pytest.mark.slow
@pytest.mark.parametrize(("name", "impl"), [("AeroCubeRotateZAxis", None), ("Go1Getup", "jax")])
def test_playground_selects_the_simulator_if_the_task_can(monkeypatch, name, impl):
    need("playground")
    from mujoco_playground import registry

    load, given = registry.load, {}

    def load_another(name, config_overrides):  # the robots of these tasks are a download
        given.update(config_overrides)
        return load("CartpoleBalance")

    monkeypatch.setattr(registry, "load", load_another)
    make_env(f"playground:{name}", episode_length=10)
    assert given == {"episode_length": 10} | ({"impl": impl} if impl else {})


@pytest.mark.slow
def test_jaxmarl_has_no_pool():
    need("jaxmarl")
    with pytest.raises(ValueError, match="jaxmarl:MPE_simple_spread_v3 has no pool of initial states"):
        make_env("jaxmarl:MPE_simple_spread_v3", pool=4)


@pytest.mark.parametrize("option", ["max_steps_in_episode", "pool"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "10"])
def test_limits_and_pools_of_families_are_whole_numbers(monkeypatch, option, value):
    monkeypatch.setattr(families, "check_family_name", lambda name: None)
    with pytest.raises(ValueError, match=f"{option} = {value!r} must be a whole number from 1 to 2,147,483,647"):
        make_env(IDS["xminigrid"], **{option: value})


@pytest.mark.parametrize("value", [0, -3, 2.5, "5"])
def test_limits_of_gymnax_are_whole_numbers(value):
    with pytest.raises(
        ValueError, match=f"max_steps_in_episode = {value!r} must be a whole number from 1 to 2,147,483,647"
    ):
        make_env("CartPole-v1", max_steps_in_episode=value)


@pytest.mark.slow
def test_jumanji_masks_of_combinations_become_one_action():
    need("jumanji")
    env = make_env("jumanji:Tetris-v0")
    assert env.action_spec.num_actions == 40
    assert env.obs_spec["action_mask"].shape == (40,)
    _, steps = play(env, 8)
    assert not steps.terminated.any()  # an illegal action would end the episode


@pytest.mark.slow
def test_jumanji_actions_of_several_agents_stay_multi_discrete():
    need("jumanji")
    env = make_env("jumanji:Cleaner-v0")
    assert env.action_spec.nvec == (4, 4, 4)
    assert env.obs_spec["action_mask"].shape == (12,)


@pytest.mark.slow
def test_jumanji_marks_all_actions_where_none_is_legal():
    need("jumanji")
    env = make_env("jumanji:Snake-v1", num_rows=3, num_cols=3)
    _, steps = play(env, 64, num_envs=64)
    assert steps.obs["action_mask"].any(-1).all()
    assert steps.final_obs["action_mask"].any(-1).all()


def test_unknown_names_have_a_hint():
    pytest.importorskip("craftax")
    with pytest.raises(ValueError, match="did you mean craftax:Craftax-Symbolic-v1"):
        choose_backend("craftax:Craftax-Symbolc-v1")


def test_hints_do_not_repeat_the_family(monkeypatch):
    monkeypatch.setattr(families, "is_installed", lambda family: True)
    monkeypatch.setattr(families, "family_env_names", lambda family: ["craftax:Craftax-Symbolic-v1"])
    with pytest.raises(ValueError, match=r"did you mean craftax:Craftax-Symbolic-v1\?"):
        choose_backend("craftax:Craftax-Symbolc-v1")
    with pytest.raises(ValueError, match=r"'craftax:'; `jppo envs` lists all names"):
        choose_backend("craftax:")


def test_gymnasiums_name_of_the_time_limit_is_explained(monkeypatch):
    monkeypatch.setattr(families, "check_family_name", lambda name: None)
    with pytest.raises(ValueError, match="no option max_episode_steps; did you mean max_steps_in_episode"):
        make_env("jumanji:Snake-v1", max_episode_steps=3)


def test_a_name_without_its_family_has_a_hint():
    with pytest.raises(ValueError, match=r"`jppo envs craftax` lists|pip install 'jppo\[craftax\]'$"):
        choose_backend("Craftax-Symbolic-v1")


@pytest.mark.parametrize("backend", ["auto", "device", "ray"])
def test_gymnax_is_no_prefix(backend):
    with pytest.raises(ValueError, match=r"^gymnax:CartPole-v1: .* have no prefix; use CartPole-v1$"):
        jppo.train("gymnax:CartPole-v1", ray=jppo.RayConfig() if backend == "ray" else None, backend=backend)
    with pytest.raises(ValueError, match="have no prefix"):
        make_env("gymnax:CartPole-v1")


@pytest.mark.parametrize("name", ["craftax:Craftax-Symbolic-v1", "atari:Pong-v5"])
def test_a_family_in_capital_letters_has_a_hint(name):
    with pytest.raises(ValueError, match=rf"; did you mean {name}\?$"):
        choose_backend(name[0].upper() + name[1:])


def test_a_family_that_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(families, "is_installed", lambda family: False)
    with pytest.raises(ValueError, match=r"needs the package xminigrid, which is not installed; pip install 'jppo\[xm"):
        make_env("xminigrid:MiniGrid-Empty-5x5")


def test_a_gymnax_that_another_package_has_overwritten_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", types.ModuleType("gymnax"))
    with pytest.raises(ValueError, match=r"overwritten gymnax.*pip uninstall -y stable-gymnax"):
        make_env("CartPole-v1")


@pytest.mark.slow
def test_a_gymnax_without_register_is_reported(tmp_path):
    """The package has the names and the submodules of stable-gymnax 0.0.1, which has the API of gymnax 0.0.x."""
    package = tmp_path / "gymnax"
    (package / "environments").mkdir(parents=True)
    (package / "environments" / "__init__.py").write_text("class EnvParams: ...\nclass EnvState: ...\n")
    (package / "registration.py").write_text(
        'registered_envs = ["CartPole-v1"]\ndef make(env_id, **env_kwargs):\n    raise NotImplementedError\n'
    )
    (package / "__init__.py").write_text(
        "from gymnax import environments, registration\n"
        "EnvParams, EnvState = environments.EnvParams, environments.EnvState\n"
        "make, registered_envs = registration.make, registration.registered_envs\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(jppo.__file__).parents[1])])
    for command in (["train", "CartPole-v1"], ["check-env", "CartPole-v1"], ["envs"]):
        done = subprocess.run(
            [sys.executable, "-m", "jppo", *command],
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        lines = done.stderr.splitlines()
        assert len(lines) == 1, lines
        assert "overwritten gymnax with an older version" in lines[0]
        assert "pip uninstall -y stable-gymnax && pip install --force-reinstall" in lines[0]


def test_families_run_on_the_device_only():
    with pytest.raises(ValueError, match="runs on the device"):
        choose_backend("craftax:Craftax-Symbolic-v1", "ray")


def test_each_family_has_an_adapter_and_an_extra():
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for family in FAMILIES:
        assert family in extras
        assert importlib.util.find_spec(f"jppo.envs.families.{family}") is not None


@pytest.mark.parametrize(("library", "setting"), [("libEGL.so.1", "egl"), (None, "disabled")])
def test_mujoco_uses_egl_without_a_display_only_if_it_is_installed(monkeypatch, library, setting):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(families.ctypes.util, "find_library", lambda name: library)
    monkeypatch.setattr(families.importlib, "import_module", lambda name: os.environ["MUJOCO_GL"])
    assert families._adapter("playground") == setting
    monkeypatch.delenv("MUJOCO_GL")
