"""Names of environment families, whose environments have names such as "craftax:Craftax-Symbolic-v1"."""

import re
from typing import Any

FAMILIES = {  # on the device: prefix of the ids and name of the extra -> package to import
    "brax": "brax",
    "craftax": "craftax",
    "jaxmarl": "jaxmarl",
    "jumanji": "jumanji",
    "navix": "navix",
    "playground": "mujoco_playground",
    "xminigrid": "xminigrid",
}
HOST_FAMILIES = {  # on the host: the same
    "atari": "ale_py",
    "envpool": "envpool",
    "minigrid": "minigrid",
    "pettingzoo": "pettingzoo",
}
GYMNASIUM_GROUPS = {  # groups of environments that Gymnasium always registers, and extras -> package to import
    "box2d": "Box2D",
    "mujoco": "mujoco",
}


def family_of(env: Any) -> str | None:
    """Returns the family on the device to which an environment's name belongs, or None."""
    return _prefix_in(FAMILIES, env)


def host_family_of(env: Any) -> str | None:
    """Returns the family on the host to which an environment's name belongs, or None."""
    return _prefix_in(HOST_FAMILIES, env)


def _prefix_in(families: dict[str, str], env: Any) -> str | None:
    prefix, colon, _ = env.partition(":") if isinstance(env, str) else ("", "", "")
    return prefix if colon and prefix in families else None


def without_version(name: str) -> str:
    """Returns an environment's name without its version, such as "-v5"."""
    return re.sub(r"-v\d+$", "", name)
