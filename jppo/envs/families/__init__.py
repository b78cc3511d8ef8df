"""Environment families on the device. Each has an adapter module with `names` and `make`, imported on first use."""

import ctypes.util
import importlib
import os
import subprocess
import textwrap
from typing import Any

from jppo.config.checks import MAX_INT32, check_int
from jppo.config.families import FAMILIES, family_of
from jppo.envs.base import Environment
from jppo.envs.contract import BrokenContractError
from jppo.envs.modules import MissingDownloadError, is_installed, unknown_environment
from jppo.errors import Refused

_COMMON = ("max_steps_in_episode", "pool")  # options of all families


def install_command(family: str) -> str:
    """Returns the command that installs a family."""
    return f"pip install 'jppo[{family}]'"


def family_env_names(family: str) -> list[str]:
    """Returns the names of a family's environments. Imports the family, which must be installed."""
    return [f"{family}:{name}" for name in _adapter(family).names()]


def can_draw_family(name: str) -> bool:
    """Returns whether an environment of a family can be drawn: none of Jumanji, and some of JaxMARL."""
    family, _, short = name.partition(":")
    return family not in ("jumanji", "jaxmarl") or short.startswith(("HeuristicEnemySMAX", "SMAX", "jaxnav"))


def check_family_name(name: str) -> None:
    """Raises ValueError if the family of an environment's name is not installed, or does not have the environment."""
    family = family_of(name)
    assert family is not None, "of the environment's name"
    if not is_installed(family):
        problem = f"{name} needs the package {FAMILIES[family]}, which is not installed"
        raise Refused(f"{problem}; {install_command(family)}")
    if name not in (known := family_env_names(family)):
        raise unknown_environment(name, known)


def make_family_env(name: str, **options: Any) -> Environment:
    """Returns an environment of a family.

    Args:
      name: such as "craftax:Craftax-Symbolic-v1".
      **options: max_steps_in_episode (the time limit), pool (see `with_limit_and_reset`), and options of the family
        (docs/environments.md).

    Raises:
      ValueError: the family is not installed, the name is unknown, or an option is invalid.
    """
    check_family_name(name)
    if "max_episode_steps" in options:
        raise Refused(f"{name} has no option max_episode_steps; did you mean max_steps_in_episode?")
    for option in _COMMON:
        if options.get(option) is not None:
            options[option] = check_int(option, options[option], maximum=MAX_INT32)
    family, _, short = name.partition(":")
    try:
        env: Environment = _adapter(family).make(short, **options)
    except (OSError, subprocess.CalledProcessError) as error:  # downloads of levels (Sokoban) and of robots, with git
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        needs = "a network connection and git" if family == "playground" else "a network connection"
        problem = f"{name} could not be made, because a file or a download is missing ({reason})"
        raise MissingDownloadError(f"{problem}; its download needs {needs}") from error
    except Exception as error:  # a family may raise any exception for an option, or on another version of a package
        if isinstance(error, BrokenContractError) or str(error).startswith(name):
            raise
        own = [option for option in options if option not in _COMMON]
        with_options = f" with the options {', '.join(own)}" if own else ""
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise Refused(f"{name} cannot be made{with_options} ({reason})") from error
    return env._replace(name=name)


def choose_mujoco_gl() -> None:
    """Sets MUJOCO_GL on a machine without a display, where MuJoCo's default aborts and "egl" needs its library.

    MuJoCo reads it when it is imported.
    """
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("MUJOCO_GL", "egl" if ctypes.util.find_library("EGL") else "disabled")


def _adapter(family: str) -> Any:
    choose_mujoco_gl()
    return importlib.import_module(f"jppo.envs.families.{family}")
