"""Names of environment families whose environments run on the device."""

from typing import Any

FAMILIES = {  # prefix of the ids and name of the extra -> package to import
    "brax": "brax",
    "craftax": "craftax",
    "jumanji": "jumanji",
    "navix": "navix",
    "playground": "mujoco_playground",
    "xminigrid": "xminigrid",
}


def family_of(env: Any) -> str | None:
    """Returns the family of an environment's name, such as "craftax:Craftax-Symbolic-v1", or None."""
    prefix, colon, _ = env.partition(":") if isinstance(env, str) else ("", "", "")
    return prefix if colon and prefix in FAMILIES else None
