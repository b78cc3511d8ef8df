"""Names of environments: families, imports of module:name, and the message for unknown names."""

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jppo.config.checks import closest_names, find_similar
from jppo.config.families import FAMILIES, GYMNASIUM_GROUPS, HOST_FAMILIES
from jppo.errors import Refused

_PREFIXES = FAMILIES | HOST_FAMILIES


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


def unknown_environment(name: str, known: Iterable[str]) -> Refused:
    """Returns the exception for an unknown environment; its message contains up to three similar names, or a remedy."""
    families = _PREFIXES | GYMNASIUM_GROUPS
    family = next((one for one in families if ":" not in name and name.lower().startswith(one)), None)
    if family is not None and not is_installed(family):
        hint = f"the family {family} is not installed; pip install 'jppo[{family}]'"
    elif near := closest_names(name, known):
        hint = f"did you mean {' or '.join(near)}?"
    elif family is not None:
        hint = f"`jppo envs {family}` lists the names of this family"
    else:
        hint = "`jppo envs` lists all names; your own environment needs the form module:name"
    return Refused(f"unknown environment {name!r}; {hint}")
