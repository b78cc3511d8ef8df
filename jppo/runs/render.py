"""Renders an episode as a GIF."""

import functools
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.checks import check_int
from jppo.config.run import MAX_FRAMES
from jppo.devices.jit import jit
from jppo.envs import Environment
from jppo.envs.episodes import EpisodicEnv
from jppo.envs.families import choose_mujoco_gl
from jppo.envs.gymnasium import HostEnvironment
from jppo.ppo.keys import derive_key
from jppo.ppo.types import Array, PyTree
from jppo.runs.episodes import DeviceEpisodes, check_legal_actions, make_host_player, start_episodes, step_episodes
from jppo.runs.files import write_atomically
from jppo.runs.policy import TrainedPolicy
from jppo.runs.run_dir import check_output

_CHUNK = 500  # steps
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


class Playback(NamedTuple):
    """The episode of a GIF."""

    length: int  # steps
    episode_return: float
    finished: bool  # False if the episode was cut at max_steps


def play_gif(
    env: Environment | HostEnvironment,
    policy: TrainedPolicy,
    output: Path,
    *,
    seed: int = 0,
    sampled: bool = False,
    max_steps: int = MAX_FRAMES,
    progress: Callable[[str], None] = lambda text: None,
) -> Playback:
    """Plays one episode and writes it as a GIF.

    Args:
      sampled: sample actions instead of taking the most likely ones.
      max_steps: a longer episode is cut.
      progress: called with a short text at each step or frame.

    Raises:
      ValueError: the environment cannot be drawn, the output cannot be written, or an action_mask marks no legal
        action.
    """
    if isinstance(env, Environment):
        check_drawable(env)
    check_output(output, ".gif")
    max_steps = check_int("max_steps", max_steps)
    if isinstance(env, HostEnvironment):
        frames, played = _host_episode(env, policy, seed, sampled, max_steps, progress)
        draw = functools.partial(_save, frames)
    else:
        has_render = isinstance(env.source, EpisodicEnv)
        convert = _drawer(env, progress) if has_render else list
        states, returns, finished = _device_episode(env, policy, seed, sampled, max_steps, convert)
        played = Playback(len(returns), returns[-1], finished)
        if has_render:
            draw = functools.partial(_save, states)
        elif env.name in CLASSIC_CONTROL:
            draw = functools.partial(_draw_classic_control, env, states, progress)
        else:
            draw = functools.partial(_draw_with_gymnax, env, states, returns, progress)
    try:
        draw(output)
    except OSError as error:
        raise ValueError(f"output {output} cannot be written: {error.strerror or error}") from error
    return played


def check_drawable(env: Environment | HostEnvironment) -> None:
    """Raises ValueError if an environment cannot be drawn. Makes and closes a host environment."""
    if isinstance(env, HostEnvironment):
        _choose_display()
        env.make([0], render=True).close()
    elif isinstance(env.source, EpisodicEnv):
        if env.source.render is None:
            raise ValueError(f"{env.name} cannot be drawn: its EpisodicEnv has no render function")
    elif env.name not in DRAWABLE:
        raise ValueError(
            f"{env.name} cannot be drawn; supported environments: {', '.join(DRAWABLE)}, and a jppo.EpisodicEnv with a "
            "render function"
        )


def _choose_display() -> None:
    """Sets the environment variables with which SDL and MuJoCo need neither screen nor sound."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    choose_mujoco_gl()


def _device_episode(
    env: Environment,
    policy: TrainedPolicy,
    seed: int,
    sampled: bool,
    max_steps: int,
    convert: Callable[[list[PyTree]], list[Any]],
) -> tuple[list[Any], list[float], bool]:
    """Returns the environment states before each step of one episode, the return after each step, and whether it ended.

    Steps the environment in chunks of a fixed length, because the length of the episode is unknown.

    Args:
      convert: applied to the states of each chunk, for example to draw them, so that memory holds one chunk of states.
    """

    def step(episodes: DeviceEpisodes, _: None) -> tuple[DeviceEpisodes, tuple[PyTree, Array]]:
        after = step_episodes(env, policy.policy, sampled, policy.state, episodes)
        return after, (episodes.env_state, after.returns)

    play = jit(lambda start, length: jax.lax.scan(step, start, length=length), static_argnames="length")
    key = derive_key(jax.random.key(seed), "play")
    episodes = jit(functools.partial(start_episodes, env, policy.policy))(key[None])
    all_states: list[Any] = []
    all_returns: list[float] = []
    while not episodes.done.all() and len(all_returns) < max_steps:
        episodes, played = play(episodes, length=min(_CHUNK, max_steps - len(all_returns)))
        check_legal_actions(env.name, np.asarray(episodes.stuck))
        states, returns = jax.device_get(played)
        length = int(episodes.lengths[0]) - len(all_returns)
        all_states += convert([jax.tree.map(lambda x, i=i: jnp.asarray(x[i, 0]), states) for i in range(length)])
        all_returns += returns[:length, 0].tolist()
    return all_states, all_returns, bool(episodes.done.all())


def _drawer(env: Environment, progress: Callable[[str], None]) -> Callable[[list[PyTree]], list[Any]]:
    """Returns a function that draws states with the function of an EpisodicEnv."""
    render, count = env.source.render, itertools.count(1)

    def draw(states: list[PyTree]) -> list[Any]:
        frames = []
        for state in states:
            progress(f"drawing frame {next(count)}")
            frames.append(_as_image(np.asarray(render(state.env_state))))
        return frames

    return draw


def _draw_with_gymnax(
    env: Environment, states: list[PyTree], returns: list[float], progress: Callable[[str], None], output: Path
) -> None:
    import matplotlib
    from gymnax.visualize import Visualizer

    class ProgressVisualizer(Visualizer):
        """Reports each frame that it draws."""

        def update(self, frame: int) -> None:
            progress(f"drawing frame {frame + 1} of {len(states)}")
            super().update(frame)

    matplotlib.use("Agg")
    ProgressVisualizer(env.source, env.params, states, np.array(returns)).animate(str(output))


def _draw_classic_control(
    env: Environment, states: list[PyTree], progress: Callable[[str], None], output: Path
) -> None:
    """Draws with Gymnasium's renderer, because gymnax's makes a new environment for each frame."""
    _choose_display()
    import gymnasium
    from gymnax.visualize.vis_gym import get_gym_state, set_gym_params

    screen: Any = gymnasium.make(env.name, render_mode="rgb_array").unwrapped
    screen.reset(seed=0)
    set_gym_params(screen, env.name, env.params)
    frames = []
    for number, state in enumerate(states, start=1):
        progress(f"drawing frame {number} of {len(states)}")
        screen.state = get_gym_state(state, env.name)
        if env.name == "Pendulum-v1":
            screen.last_u = np.asarray(state.last_u, np.float64)
        frames.append(_as_image(screen.render()))
    screen.close()
    _save(frames, output)


def _host_episode(
    env: HostEnvironment,
    policy: TrainedPolicy,
    seed: int,
    sampled: bool,
    max_steps: int,
    progress: Callable[[str], None],
) -> tuple[list[Any], Playback]:
    """Returns the images before each step of one episode, and its length and return (mean over agents)."""
    frames: list[Any] = []

    def draw(picture: np.ndarray) -> None:
        frames.append(_as_image(picture))
        progress(f"step {len(frames)}")

    _choose_display()
    play = make_host_player(env, policy.policy, sampled)
    played = play(policy.state, env.num_agents, seed, max_steps, draw=draw)
    return frames, Playback(len(frames), float(played.returns.mean()), bool(played.finished.all()))


def _as_image(frame: np.ndarray) -> Any:
    """Returns a frame as an image with 32 colours, which needs a third of its memory."""
    from PIL import Image

    return Image.fromarray(frame).quantize(32)


def _save(images: list[Any], output: Path) -> None:
    """Writes a GIF with 25 frames per second."""
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=40, loop=0)
    write_atomically(output, file.getvalue())
