"""Renders an episode as a GIF."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.devices.jit import jit
from jppo.envs import Environment
from jppo.envs.gymnasium import HostEnvironment
from jppo.ppo.policy import Policy, act
from jppo.ppo.types import PolicyState, PyTree
from jppo.runs.policy import TrainedPolicy
from jppo.runs.run_dir import check_output

CLASSIC_CONTROL = ("Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
_DRAWN_BY_GYMNAX = (
    "Asterix-MinAtar",
    "Breakout-MinAtar",
    "Catch-bsuite",
    "FourRooms-misc",
    "Freeway-MinAtar",
    "MetaMaze-misc",
    "PointRobot-misc",
    "Pong-misc",
    "Seaquest-MinAtar",
    "SpaceInvaders-MinAtar",
)
DRAWABLE = (*CLASSIC_CONTROL, *_DRAWN_BY_GYMNAX)


def play_gif(
    env: Environment | HostEnvironment,
    policy: TrainedPolicy,
    output: Path,
    *,
    seed: int = 0,
    sampled: bool = False,
    max_steps: int = 500,
) -> tuple[int, float]:
    """Plays one episode of at most max_steps steps, writes it as a GIF, and returns its length and its return.

    Args:
      sampled: sample actions instead of taking the most likely ones.

    Raises:
      ValueError: the environment cannot be drawn, or the output cannot be written.
    """
    if isinstance(env, Environment) and env.name not in DRAWABLE:
        raise ValueError(f"{env.name} cannot be drawn; supported environments: {', '.join(DRAWABLE)}")
    check_output(output, ".gif")
    if max_steps < 1:
        raise ValueError(f"max_steps = {max_steps} must be at least 1")
    if isinstance(env, HostEnvironment):
        frames, rewards = _host_episode(env, policy.policy, policy.state, seed, sampled, max_steps)
        draw = functools.partial(_save, frames)
    else:
        states, rewards = _episode(env, policy.policy, policy.state, seed, sampled, max_steps)
        draw = functools.partial(
            _draw_classic_control if env.name in CLASSIC_CONTROL else _draw_with_gymnax, env, states, rewards
        )
    try:
        draw(output)
    except OSError as error:
        raise ValueError(f"output {output} cannot be written: {error.strerror or error}") from error
    return len(rewards), float(np.sum(rewards))


def _episode(
    env: Environment, policy: Policy, state: PolicyState, seed: int, sampled: bool, max_steps: int
) -> tuple[list[PyTree], list[float]]:
    """Returns the environment states before each step of one episode, and the rewards."""

    def step(carry: tuple[PyTree, PyTree], key: jax.Array) -> tuple[tuple[PyTree, PyTree], Any]:
        obs, env_state = carry
        action_key, env_key = jax.random.split(key)
        batch = jax.tree.map(lambda x: x[None], obs)
        chosen = act(policy, state, batch, action_key if sampled else None)
        after = env.step(env_key, env_state, chosen.env_action[0])  # type: ignore[arg-type]
        return (after.obs, after.state), (env_state, after.reward, after.terminated | after.truncated)

    def play(key: jax.Array) -> Any:
        reset_key, steps_key = jax.random.split(key)
        return jax.lax.scan(step, env.reset(reset_key), jax.random.split(steps_key, max_steps))[1]

    states, rewards, done = jax.device_get(jit(play)(jax.random.key(seed)))
    length = int(np.argmax(done)) + 1 if done.any() else max_steps
    return [jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), states) for i in range(length)], rewards[:length].tolist()


def _draw_with_gymnax(env: Environment, states: list[PyTree], rewards: list[float], output: Path) -> None:
    import matplotlib
    from gymnax.visualize import Visualizer

    matplotlib.use("Agg")
    Visualizer(env.source, env.params, states, np.cumsum(rewards)).animate(str(output))


def _draw_classic_control(env: Environment, states: list[PyTree], rewards: list[float], output: Path) -> None:
    """Draws with Gymnasium's renderer, because gymnax's makes a new environment for each frame."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # needs neither screen nor sound
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    import gymnasium
    from gymnax.visualize.vis_gym import get_gym_state, set_gym_params

    screen: Any = gymnasium.make(env.name, render_mode="rgb_array").unwrapped
    screen.reset(seed=0)
    set_gym_params(screen, env.name, env.params)
    frames = []
    for state in states:
        screen.state = get_gym_state(state, env.name)
        if env.name == "Pendulum-v1":
            screen.last_u = np.asarray(state.last_u, np.float64)
        frames.append(screen.render())
    screen.close()
    _save(frames, output)


def _host_episode(
    env: HostEnvironment, policy: Policy, state: PolicyState, seed: int, sampled: bool, max_steps: int
) -> tuple[list[np.ndarray], list[float]]:
    """Returns the images before each step of one episode, and the rewards."""

    def select_action(obs: PyTree, key: jax.Array) -> jax.Array:
        return act(policy, state, obs, key if sampled else None).env_action

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("MUJOCO_GL", "egl")
    select, envs, frames, rewards = jit(select_action), env.make([seed], render=True), [], []
    with contextlib.closing(envs):
        obs = envs.reset()
        for key in jax.random.split(jax.random.key(seed), max_steps):
            frames.append(envs.render())
            after = envs.step(np.asarray(select(obs, key)))
            obs = after.obs
            rewards.append(float(after.reward[0]))
            if after.final_obs:
                break
    return frames, rewards


def _save(frames: list[np.ndarray], output: Path) -> None:
    """Writes a GIF with 25 frames per second."""
    from PIL import Image

    images = [Image.fromarray(frame).quantize(32) for frame in frames]
    images[0].save(output, save_all=True, append_images=images[1:], duration=40, loop=0)
