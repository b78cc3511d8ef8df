"""Plays an episode and draws it as a GIF."""

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.checks import check_int, check_seed
from jppo.config.run import MAX_FRAMES
from jppo.devices.jit import jit
from jppo.envs import Environment
from jppo.envs.families import choose_mujoco_gl
from jppo.envs.gymnasium import HostEnvironment
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused
from jppo.ppo.types import derive_key
from jppo.runs.display import Picture
from jppo.runs.episodes import DeviceEpisodes, check_legal_actions, make_host_player, start_episodes, step_episodes
from jppo.runs.evaluation import open_policy
from jppo.runs.policy import TrainedPolicy

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
_SLOW = ("craftax", "jaxmarl", "minigrid", "navix", "xminigrid")  # each step changes a lot
DRAWABLE = (*CLASSIC_CONTROL, *_DRAWN_BY_GYMNAX)

# (state of the environment, return after the next step) -> image [height, width, 3] u8
Draw = Callable[[PyTree, float], np.ndarray]


class Playback(NamedTuple):
    """A drawn episode."""

    gif: bytes
    length: int  # steps, one frame each
    episode_return: float
    finished: bool  # False if the episode was cut at max_steps


def play(
    env_or_run: Any, policy: Any = None, *, seed: int = 0, sampled: bool = False, max_steps: int = MAX_FRAMES
) -> Picture:
    """Plays one episode and returns it as an animation, which a notebook shows.

        jppo.play(result)                          # in a notebook
        jppo.play("runs/first").save("play.gif")

    Args:
      env_or_run, policy: see `jppo.evaluate`.
      seed: seed of the episode.
      sampled: sample actions instead of taking the most likely ones.
      max_steps: a longer episode is cut. The frames of all steps are in memory.

    Raises:
      ValueError: the environment cannot be drawn, or an argument is invalid.
    """
    seed, max_steps = check_seed(seed), check_int("max_steps", max_steps)
    env, policy = open_policy(env_or_run, policy, "jppo.play")
    played = play_gif(env, policy, seed=seed, sampled=sampled, max_steps=max_steps)
    description = f"{env.name}: {played.length} steps, return {played.episode_return:.1f}"
    return Picture(played.gif, "gif", description)


def play_gif(
    env: Environment | HostEnvironment,
    policy: TrainedPolicy,
    *,
    seed: int = 0,
    sampled: bool = False,
    max_steps: int = MAX_FRAMES,
    progress: Callable[[str], None] = lambda text: None,
) -> Playback:
    """Plays one episode and draws it.

    Args:
      seed, sampled, max_steps: see `play`.
      progress: called with a short text at each step.

    Raises:
      ValueError: the environment cannot be drawn, or an action_mask marks no legal action.
    """
    from PIL import Image

    max_steps = check_int("max_steps", max_steps)
    images: list[Image.Image] = []

    def add(frame: np.ndarray) -> None:
        images.append(
            Image.fromarray(checked_image(env.name, frame)).quantize(32)
        )  # 32 colours need a third of the memory
        progress(f"step {len(images)}")

    if isinstance(env, HostEnvironment):
        _choose_display()
        play_episode = make_host_player(env, policy.policy, sampled)
        episodes = play_episode(policy.state, env.num_agents, seed, max_steps, draw=add)
        episode_return, finished = float(episodes.returns.mean()), bool(episodes.finished.all())
    else:
        check_drawable(env)
        with _open_screen(env) as draw:
            episode_return, finished = _play_on_device(
                env, policy, seed, sampled, max_steps, lambda *shown: add(draw(*shown))
            )
    is_slow = env.name in _DRAWN_BY_GYMNAX or env.name.partition(":")[0] in _SLOW
    file, frame_milliseconds = io.BytesIO(), 100 if is_slow else 40
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=frame_milliseconds, loop=0)
    return Playback(gif=file.getvalue(), length=len(images), episode_return=episode_return, finished=finished)


def check_drawable(env: Environment | HostEnvironment) -> None:
    """Raises ValueError if an environment cannot be drawn. Makes and closes a host environment."""
    if isinstance(env, HostEnvironment):
        _choose_display()
        env.make([0], render=True).close()
    elif env.render is None and env.name not in DRAWABLE:
        raise Refused(
            f"{env.name} cannot be drawn: it has no render function; `jppo envs` shows which environments have one; "
            "your own environment can be a jppo.EpisodicEnv with render"
        )


def _choose_display() -> None:
    """Sets the environment variables with which SDL and MuJoCo need neither screen nor sound."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    choose_mujoco_gl()


def _play_on_device(
    env: Environment,
    policy: TrainedPolicy,
    seed: int,
    sampled: bool,
    max_steps: int,
    draw: Callable[[PyTree, float], None],
) -> tuple[float, bool]:
    """Plays one episode. Returns its return, and whether it ended.

    Steps the environment in chunks of a fixed length, because the length of the episode is unknown. With several
    agents, the return is their mean, and the episode ends with that of the last agent.

    Args:
      draw: called with the environment's state before each step, and the return after it.
    """

    def step(episodes: DeviceEpisodes, _: None) -> tuple[DeviceEpisodes, tuple[PyTree, Array]]:
        after = step_episodes(env, policy.policy, sampled, policy.state, episodes)
        return after, (episodes.env_state, after.returns)

    run = jit(lambda start, length: jax.lax.scan(step, start, length=length), static_argnames="length")
    key = derive_key(jax.random.key(seed), "play")
    keys = key[None] if env.num_agents == 1 else jax.random.split(key, env.num_agents)
    episodes, count = jit(functools.partial(start_episodes, env, policy.policy))(keys), 0
    while not episodes.done.all() and count < max_steps:
        episodes, played = run(episodes, length=min(_CHUNK, max_steps - count))
        check_legal_actions(env.name, np.asarray(episodes.stuck))
        states, returns = jax.device_get(played)
        length = int(episodes.lengths.max()) - count
        for i in range(length):
            draw(jax.tree.map(lambda x, i=i: jnp.asarray(x[i, 0]), states), float(returns[i].mean()))
        count += length
    return float(episodes.returns.mean()), bool(episodes.done.all())


def _open_screen(env: Environment) -> contextlib.AbstractContextManager[Draw]:
    if env.render is not None:
        render = env.render
        return contextlib.nullcontext(lambda state, _: render(state))
    return _open_classic_control(env) if env.name in CLASSIC_CONTROL else _open_gymnax(env)


def checked_image(name: str, image: Any) -> np.ndarray:
    """Returns an array [H, W] or [H, W, 3 or 4] u8. Raises ValueError for something else."""
    array = np.asarray(image)
    is_picture = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not is_picture or not array.size:
        found = f"an array of shape {array.shape} and dtype {array.dtype}"
        found = found if array.dtype != object else f"a {type(image).__name__}"
        raise Refused(f"{name}: render returned {found}; return an image [height, width, 3] of uint8")
    return array


@contextlib.contextmanager
def _open_classic_control(env: Environment) -> Iterator[Draw]:
    """Draws with Gymnasium's renderer, because gymnax's makes a new environment for each frame."""
    _choose_display()
    import gymnasium
    from gymnax.visualize.vis_gym import get_gym_state, set_gym_params

    def draw(state: PyTree, _: float) -> np.ndarray:
        screen.state = get_gym_state(state, env.name)
        if env.name == "Pendulum-v1":
            screen.last_u = np.asarray(state.last_u, np.float64)
        return screen.render()

    with contextlib.closing(gymnasium.make(env.name, render_mode="rgb_array")) as made:
        screen: Any = made.unwrapped
        screen.reset(seed=0)
        set_gym_params(screen, env.name, env.params)
        yield draw


@contextlib.contextmanager
def _open_gymnax(env: Environment) -> Iterator[Draw]:
    import matplotlib

    matplotlib.use("Agg")
    from gymnax.visualize import Visualizer
    from matplotlib import pyplot

    states: list[PyTree] = []
    returns: list[float] = []
    visualizer = Visualizer(env.source, env.params, states, returns)

    def draw(state: PyTree, episode_return: float) -> np.ndarray:
        states.append(state)
        returns.append(episode_return)
        if len(states) == 1:
            visualizer.init()
        visualizer.update(len(states) - 1)
        visualizer.fig.canvas.draw()
        return np.asarray(visualizer.fig.canvas.buffer_rgba())[..., :3]

    try:
        yield draw
    finally:
        pyplot.close(visualizer.fig)
