"""Functions that draw the state of an environment of a family as an image [H, W, 3] u8, for `jppo play`.

Each imports what it needs at its first image, because training does not draw.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

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
