"""Adapter for Brax, tested with 0.14.2 (https://github.com/google/brax). Its developers recommend MuJoCo Playground.

Brax's wrappers return to the first state of the run after each episode, and training masks truncated steps. Here, each
reset is a new one, and truncated episodes bootstrap.
"""

from typing import Any

from brax import envs
from brax.io import image

from jppo.envs.base import Environment
from jppo.envs.episodes import with_limit_and_reset
from jppo.envs.families.physics import episodic_env

_LIMIT = 1000  # steps, of Brax's training configurations
_NAMES = (
    *("ant", "halfcheetah", "hopper", "humanoid", "humanoidstandup", "inverted_double_pendulum"),
    *("inverted_pendulum", "pusher", "reacher", "swimmer", "walker2d"),
)


def names() -> tuple[str, ...]:
    """Returns the names of the environments."""
    return _NAMES


def make(name: str, max_steps_in_episode: int | None = None, pool: int | None = None, **options: Any) -> Environment:
    """Returns an environment.

    Args:
      max_steps_in_episode: time limit; 1,000 when None.
      **options: arguments of Brax's class, e.g. backend="spring".
    """
    source = envs.get_environment(name, **options)
    env = episodic_env(
        name, source, 1, lambda obs: obs, lambda state: image.render_array(source.sys, state.pipeline_state)
    )
    return with_limit_and_reset(env, max_steps_in_episode or _LIMIT, pool)
