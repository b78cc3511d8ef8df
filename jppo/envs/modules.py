"""Names of environments: families, imports of module:name, and the message for unknown names."""

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jppo.config.checks import closest_names, find_similar
from jppo.config.families import FAMILIES, GYMNASIUM_GROUPS, HOST_FAMILIES, atari_game, without_version
from jppo.errors import Refused

_PREFIXES = FAMILIES | HOST_FAMILIES
_NAMES_OF = {  # names, without the prefix of their family
    "craftax": r"Craftax-.*",
    "envpool": r"BabyAI-.*",
    "jaxmarl": r"MPE_.*|(HeuristicEnemy)?SMAX|coin_game|hanabi|jaxnav|overcooked(_v2)?|switch_riddle",
    "jumanji": r"(BinPack|Cleaner|Connector|CVRP|FlatPack|Game2048|GraphColoring|JobShop|Knapsack|LevelBasedForaging|"
    r"Maze|Minesweeper|MMST|MultiCVRP|PacMan|RobotWarehouse|RubiksCube|SearchAndRescue|SlidingTilePuzzle|Snake|"
    r"Sokoban|Sudoku|Tetris|TSP)-v[0-3]",
    "minigrid": r"MiniGrid-.*-v\d",
    "navix": r"Navix-.*",
    "playground": r"(Acrobot|Cartpole|Pendulum)(Balance|Swingup)(Sparse)?|BallInCup|CheetahRun|FingerSpin|FishSwim|"
    r"(FingerTurn|Reacher)(Easy|Hard)|Hopper(Hop|Stand)|(Humanoid|Walker)(Run|Stand|Walk)|PointMass|SwimmerSwimmer6|"
    r"(Aero|Aloha|Apollo|Barkour|BerkeleyHumanoid|G1|Go1|H1|Leap|Op3|Panda|Spot|T1)[A-Z].*",
    "xminigrid": r"XLand-.*|MiniGrid-.*(?<!-v\d)",
}


class MissingDownloadError(Refused):
    """A download that an environment needs has failed. This is not a fault of the environment."""


def is_installed(family: str) -> bool:
    """Returns whether the package of a family or of a group of Gymnasium's environments can be imported."""
    return importlib.util.find_spec((_PREFIXES | GYMNASIUM_GROUPS)[family]) is not None


def import_module_of(source: str) -> tuple[Any, str]:
    """Imports the module of "module:name". Returns the module and the name.

    Raises:
      ValueError: the module does not exist or has a syntax error, the name is empty, or it is one of gymnax with a
        prefix.
    """
    module_name, _, attribute = source.partition(":")
    if module_name == "gymnax":  # Gymnasium may have an environment of the same name
        raise Refused(f"{source}: names of gymnax environments have no prefix; use {attribute}")
    if module_name.endswith(".py"):
        raise Refused(f"{source}: write the name of the module, not of its file: {Path(module_name).stem}:{attribute}")
    if not attribute:
        raise Refused(f"{source} has no name after the colon; write module:name")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise Refused(f"{source}: {module_name!r} is not a valid module name; write module:name")
    try:
        return importlib.import_module(module_name), attribute
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise
        family = find_similar(module_name.lower(), _PREFIXES)
        hint = f"; did you mean {family}:{attribute}?" if family else ""
        raise Refused(f"{source}: there is no module {module_name} on the Python path{hint}") from None
    except SyntaxError as error:
        place = f" in {error.filename}, line {error.lineno}" if error.filename else ""
        raise Refused(f"{source}: {error.msg}{place}") from None


def make_named(source: str) -> Any:
    """Returns the object "module:name"; calls it if it is a class or a function.

    Raises:
      ValueError: the module or the name does not exist, or the object is a str.
    """
    module, name = import_module_of(source)
    if not hasattr(module, name):
        similar = find_similar(name, [known for known in vars(module) if not known.startswith("_")])
        hint = f"; did you mean {similar}?" if similar else ""
        raise Refused(f"{source}: module {module.__name__} has no {name}{hint}")
    found = getattr(module, name)
    made = found() if callable(found) else found
    if isinstance(made, str):
        raise Refused(f"{source} made the str {made!r}; it must make an environment")
    return made


def names_in_families(name: str) -> dict[str, str]:
    """Returns the families to which a name without prefix can belong, and its name there."""
    found = {family: name for family, pattern in _NAMES_OF.items() if re.fullmatch(pattern, name)}
    if prefixed := re.fullmatch(rf"({'|'.join(_PREFIXES)})(?:[/_.]|(?=[A-Z]))(.+)", name):
        found[prefixed[1]] = prefixed[2]
    if game := atari_game(name):
        found["envpool" if is_installed("envpool") and not is_installed("atari") else "atari"] = f"{game}-v5"
    return found


def _with_prefix(name: str, known: list[str]) -> Iterator[str]:
    """Yields ids of families that a name without prefix can mean, and how to install the families."""
    for family, short in names_in_families(name).items():
        ids = [one for one in known if one.startswith(f"{family}:")]
        if not is_installed(family):
            yield f"{family}:{short} (pip install 'jppo[{family}]')"
        elif ids:
            yield from closest_names(f"{family}:{short}", ids)[:1]
        else:
            yield f"{family}:{short}"


def unknown_environment(name: str, known: Iterable[str]) -> Refused:
    """Returns the exception for an unknown environment; its message contains up to three similar names."""
    known = list(known)
    near = closest_names(name, known)
    forms = "`jppo envs` lists all names; your own environment needs the form module:name"
    if name in _PREFIXES | GYMNASIUM_GROUPS:
        near, forms = [], f"it is a family: `jppo envs {name}` lists its environments or says how to install it"
    if ":" not in name:
        versions = [one for one in near if without_version(one) == without_version(name)]
        near = list(dict.fromkeys([*versions, *_with_prefix(name, known), *near]))[:3]
    hint = f"did you mean {' or '.join(near)}?" if near else forms
    return Refused(f"unknown environment {name!r}; {hint}")
