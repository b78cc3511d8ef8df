"""Functions that draw the state of an environment of a family as an image [H, W, 3] u8, for `jppo play`.

Each imports what it needs at its first image, because training does not draw.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jppo.envs.spaces import PyTree

Render = Callable[[PyTree], Any]  # state -> image


def craftax_renderer(name: str) -> Render:
    """Returns a function that draws a state of the environment with this name."""

    @functools.cache
    def compiled() -> Any:
        game = "craftax_classic" if "Classic" in name else "craftax"
        block_size = importlib.import_module("craftax.craftax.constants").BLOCK_PIXEL_SIZE_IMG
        renderer = importlib.import_module(f"craftax.{game}.renderer")
        return jax.jit(renderer.make_craftax_pixel_renderer(block_size))

    return lambda state: np.asarray(compiled()(state)).astype(np.uint8)


def jumanji_renderer(source: Any) -> Render:
    """Returns a function that draws with the viewer of an environment, which would open a window or return nothing."""
    viewer = next(value for name, value in vars(source).items() if name.endswith("viewer"))
    images: list[Any] = []
    viewer._display = lambda figure: images.append(viewer._display_rgb_array(figure))

    def render(state: PyTree) -> Any:
        with warnings.catch_warnings(action="ignore"):  # that no window is shown
            source.render(state)
        return images.pop()[::2, ::2, :3]

    return render


def mujoco_renderer(model: Any) -> Render:
    """Returns a function that draws states with positions `state.data` of a model of MuJoCo."""

    @functools.cache
    def screen() -> Any:
        return importlib.import_module("mujoco").Renderer(model, height=240, width=320)

    def render(state: PyTree) -> Any:
        mujoco = importlib.import_module("mujoco")
        data = mujoco.MjData(model)
        data.qpos, data.qvel = jax.device_get((state.data.qpos, state.data.qvel))
        data.mocap_pos, data.mocap_quat = jax.device_get((state.data.mocap_pos, state.data.mocap_quat))
        mujoco.mj_forward(model, data)
        screen().update_scene(data, camera=0 if model.ncam else -1)
        return screen().render()

    return render


def draw_navix(timestep: PyTree) -> Any:
    """Draws a time step. Its state has no cache of images, which the adapter removes."""
    cache = importlib.import_module("navix.rendering.cache").RenderingCache
    state = timestep.state.replace(cache=cache.init(jnp.asarray(timestep.state.grid)))
    return np.asarray(importlib.import_module("navix.observations").rgb(state)).repeat(4, axis=0).repeat(4, axis=1)


def draws_jaxmarl(name: str) -> bool:
    """Returns whether JaxMARL has pictures of an environment, and the package for them is installed."""
    needs_imageio = name.startswith("overcooked_v2")
    return name.startswith(tuple(_JAXMARL)) and (not needs_imageio or importlib.util.find_spec("imageio") is not None)


def jaxmarl_renderer(name: str, source: Any) -> Render | None:
    """Returns a function that draws a state of JaxMARL's environment, or None if `draws_jaxmarl` is false."""
    if not draws_jaxmarl(name):
        return None
    make = functools.cache(next(make for prefix, make in _JAXMARL.items() if name.startswith(prefix)))
    return lambda state: make(source)(jax.device_get(state.env_state))


def _mpe(source: Any) -> Render:
    visualizer = importlib.import_module("jaxmarl.environments.mpe.mpe_visualizer").MPEVisualizer

    @functools.cache
    def screen() -> Any:
        axes = _square_axes()
        own = mock.patch("matplotlib.pyplot.subplots", return_value=(axes.figure, axes))  # pyplot may open a window
        with own, contextlib.redirect_stdout(io.StringIO()):
            return visualizer(source, [source.reset(jax.random.key(0))[1]])

    def draw(state: PyTree) -> Any:
        screen().state_seq = [state]
        screen().update(0)
        return _pixels(screen().fig)

    return draw


def _smax(source: Any) -> Render:
    axes = _square_axes()
    units = getattr(source, "all_agents", source.agents)

    def draw(state: PyTree) -> Any:
        state = getattr(state, "state", state)  # HeuristicEnemySMAX also has a state of the enemy's policy
        actions = dict(zip(units, state.prev_attack_actions, strict=True))
        return source.init_render(axes, (None, state, actions), 0, int(state.step)).get_array()[..., :3]

    return draw


def _jaxnav(source: Any) -> Render:
    axes = _square_axes()

    def draw(state: PyTree) -> Any:
        axes.clear()
        source.init_render(axes, state, lidar=False)
        return _pixels(axes.figure)

    return draw


def _overcooked(source: Any) -> Render:
    visualizer = importlib.import_module("jaxmarl.viz.overcooked_visualizer").OvercookedVisualizer
    inside = slice(source.agent_view_size - 2, 2 - source.agent_view_size)

    def draw(state: PyTree) -> Any:
        grid = state.maze_map[inside, inside]
        return visualizer._render_grid(grid, agent_dir_idx=state.agent_dir_idx, agent_inv=state.agent_inv)

    return draw


def _overcooked_v2(source: Any) -> Render:
    visualizer = importlib.import_module("jaxmarl.viz.overcooked_v2_visualizer").OvercookedV2Visualizer()
    return lambda state: np.asarray(visualizer._render_state(state))


_JAXMARL = {  # start of the name -> function (environment) -> function that draws its states
    "HeuristicEnemySMAX": _smax,
    "MPE_": _mpe,
    "SMAX": _smax,
    "jaxnav": _jaxnav,
    "overcooked_v2": _overcooked_v2,
    "overcooked": _overcooked,
}


def _square_axes() -> Any:
    """Returns the axes of a new figure. SMAX confuses the width and the height of others."""
    return importlib.import_module("matplotlib.figure").Figure((5, 5)).add_subplot()


def _pixels(figure: Any) -> Any:
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]  # a copy, because the next drawing may overwrite the buffer
