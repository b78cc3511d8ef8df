"""Environments on the host that need another package: registration, preprocessing, and errors if it is missing."""

import contextlib
import importlib
import importlib.util
import pickle
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from jppo.config.families import GYMNASIUM_GROUPS, HOST_FAMILIES
from jppo.envs.modules import is_installed, unknown_environment
from jppo.errors import Refused

_ATARI_STEPS = 27_000  # of four frames: the usual limit of 30 minutes at 60 frames per second
_GYMNASIUM_EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "opencv": "atari"}  # word in Gymnasium's error -> extra


def gymnasium_group(name: str) -> str:
    """Returns the group of one of Gymnasium's environments, such as "mujoco", or ""."""
    entry_point = str(gymnasium.registry[name].entry_point) if name in gymnasium.registry else ""
    return next((group for group in GYMNASIUM_GROUPS if entry_point.startswith(f"gymnasium.envs.{group}.")), "")


def import_family(family: str, name: str) -> Any:
    """Imports the package of a family. Raises ValueError if it is missing.

    Args:
      name: of the environment, for the message.
    """
    package = HOST_FAMILIES[family]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(name, f"{package}: {error}", family) from None


def missing_dependency(name: str, error: Exception) -> Refused:
    """Returns the exception for an environment of Gymnasium whose package is missing."""
    extras = [extra for word, extra in _GYMNASIUM_EXTRAS.items() if word in str(error).lower()]
    return _missing(name, str(error), extras[0] if extras else "")


def _missing(name: str, reason: str, extra: str) -> Refused:
    if extra:
        return Refused(f"{name} needs a package that is not installed; pip install 'jppo[{extra}]'")
    return Refused(f"{name} needs a package that is not installed: {reason}")


def register_atari(required: str = "") -> None:
    """Registers the ALE/ ids. Raises ValueError if ale-py is missing and an environment requires it."""
    if required or is_installed("atari"):
        gymnasium.register_envs(import_family("atari", required))


def pickle_registrations(dumps: Callable[[Any], bytes], required: Any = None) -> list[bytes]:
    """Returns Gymnasium's specs of environments that other processes may not know, each pickled by `dumps`.

    Leaves out those that cannot be pickled, and raises the error of `dumps` if the `required` id is one of them.
    """
    pickled = []
    for spec in gymnasium.registry.values():
        if not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")):
            try:
                pickled.append(dumps(spec))
            except Exception:
                if spec.id == required:
                    raise
    return pickled


def restore_registrations(pickled: list[bytes]) -> None:
    """Registers environments of `pickle_registrations`, unless this process has them or lacks their modules."""
    for one in pickled:
        with contextlib.suppress(Exception):  # of any module
            spec = pickle.loads(one)
            gymnasium.registry.setdefault(spec.id, spec)


def make_by_id(name: str, render_mode: str | None, **options: Any) -> gymnasium.Env:
    """Makes an environment that Gymnasium has registered.

    Raises:
      ValueError: the name is unknown, a package is missing, or the environment has no parameter render_mode.
    """
    register_atari(required=name if name.startswith("ALE/") else "")
    if render_mode:  # other classes need no such parameter
        options["render_mode"] = render_mode
    try:
        # Gymnasium's checker makes each step of CartPole-v1 2 % slower; probe_env and `jppo check-env` check more
        return gymnasium.make(name, disable_env_checker=True, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise missing_dependency(name, error) from None
    except ImportError as error:  # environments that moved to another package
        raise Refused(f"{name}: {error}") from None
    except TypeError as error:
        if "unexpected keyword argument 'render_mode'" not in str(error):
            raise
        raise Refused(f"{name} cannot be drawn: it has no parameter render_mode") from None
    except gymnasium.error.Error:
        if name in gymnasium.registry:
            raise
        raise unknown_environment(name, host_env_names()) from None


def make_family_env(name: str, render_mode: str | None = None) -> Any:
    """Makes "atari:Pong-v5" or "minigrid:MiniGrid-Empty-5x5-v0" with the preprocessing of its family, or the
    `pettingzoo.ParallelEnv` "pettingzoo:mpe/simple_spread_v3".

    Raises:
      ValueError: the package is missing, or it has no such environment.
    """
    family, _, short = name.partition(":")
    import_family(family, name)
    if short.startswith("mpe/") and not importlib.util.find_spec("mpe2"):
        raise _missing(name, "mpe2", family)
    if name not in (known := _family_env_names(family)):
        raise unknown_environment(name, known)
    makers: dict[str, Callable[[str, str | None], Any]]
    makers = {"atari": _make_atari, "minigrid": _make_minigrid, "pettingzoo": _make_pettingzoo}
    return makers[family](short, render_mode)


def _make_atari(name: str, render_mode: str | None) -> gymnasium.Env:
    """Makes a game with the preprocessing of Machado et al. (2018), "Revisiting the arcade learning environment".

    Every fourth frame, the maximum of the last two of them, 84x84 grey, four of these stacked; up to 30 idle frames at
    the start. Episodes are whole games, so a lost life does not end one. Gymnasium's wrapper would return an old
    observation if ALE's own limit of frames cut a game in the middle of four frames, so `TimeLimit` cuts it instead.
    """
    game: Any = make_by_id(f"ALE/{name}", render_mode, frameskip=1, max_num_frames_per_episode=None)
    can_idle = game.unwrapped.get_action_meanings()[0] == "NOOP"  # not in Backgammon and VideoCheckers
    try:
        screen = AtariPreprocessing(game, noop_max=30 if can_idle else 0)
    except gymnasium.error.DependencyNotInstalled as error:
        raise missing_dependency(f"atari:{name}", error) from None
    return FrameStackObservation(TimeLimit(screen, _ATARI_STEPS), 4)


def _make_minigrid(name: str, render_mode: str | None) -> gymnasium.Env:
    """Makes an environment whose observation is a vector of the agent's view and the letters of the mission."""
    from minigrid.wrappers import FlatObsWrapper

    return FlatObsWrapper(make_by_id(name, render_mode))


def _make_pettingzoo(name: str, render_mode: str | None) -> Any:
    """Makes a parallel environment. PettingZoo's group mpe is now the package mpe2."""
    pettingzoo, (group, _, short) = importlib.import_module("pettingzoo"), name.partition("/")
    if group == "mpe":
        return importlib.import_module(f"mpe2.{short}").parallel_env(render_mode=render_mode)
    try:
        return pettingzoo.make("parallel", name, render_mode=render_mode)
    except pettingzoo.env_registry.exceptions.FailedToImport as error:
        raise _missing(f"pettingzoo:{name}", str(error), "pettingzoo") from None


def host_env_names(usable: bool = False) -> list[str]:
    """Returns the names of environments that `make_host_env` accepts: the newest version of each id that Gymnasium has
    registered, and those of the installed families.

    Args:
      usable: leave out MuJoCo and Box2D environments if their package is missing.
    """
    register_atari()
    missing = tuple(f"gymnasium.envs.{group}." for group in GYMNASIUM_GROUPS if usable and not is_installed(group))
    newest: dict[str, Any] = {}
    for spec in gymnasium.registry.values():
        if spec.namespace in ("phys2d", "tabular") or spec.name in ("GymV21Environment", "GymV26Environment"):
            continue  # functional variants of other environments, and adapters
        if spec.namespace is None and _package_of(spec) in ("ale_py", "minigrid"):
            continue  # old names of the ALE/ environments, and environments whose observations contain text
        if str(spec.entry_point).startswith(missing) or "_raise_mujoco_py_error" in str(spec.entry_point):
            continue  # versions that need mujoco-py cannot be made
        key = f"{spec.namespace}/{spec.name}" if spec.namespace else spec.name
        if key not in newest or (spec.version or 0) > (newest[key].version or 0):
            newest[key] = spec
    families = [family for family in HOST_FAMILIES if family != "envpool" and is_installed(family)]
    own = [name for family in families for name in _family_env_names(family)]
    return sorted(spec.id for spec in newest.values()) + own


def _family_env_names(family: str) -> list[str]:
    """Returns the names of an installed family's environments."""
    if family == "atari":
        register_atari()
        return sorted(f"atari:{spec.name}-v5" for spec in gymnasium.registry.values() if spec.namespace == "ALE")
    if family == "pettingzoo":
        registry = importlib.import_module("pettingzoo").parallel_registry
        groups = [name for name in registry if name.startswith(("butterfly/", "sisl/"))]
        mpe = importlib.util.find_spec("mpe2")
        modules = pkgutil.iter_modules(mpe.submodule_search_locations) if mpe else ()
        groups += [f"mpe/{module.name}" for module in modules if re.search(r"_v\d+$", module.name)]
        return sorted(f"pettingzoo:{name}" for name in groups)
    importlib.import_module("minigrid")
    names = (spec.id for spec in gymnasium.registry.values() if _package_of(spec) == "minigrid")
    return sorted(f"minigrid:{name}" for name in names if name.startswith("MiniGrid-"))


def _package_of(spec: Any) -> str:
    return str(spec.entry_point).partition(".")[0]
