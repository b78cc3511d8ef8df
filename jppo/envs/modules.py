"""Imports environments that are named as module:name."""

import importlib
from typing import Any


def import_module_of(source: str) -> tuple[Any, str]:
    """Imports the module of "module:name". Returns the module and the name.

    Raises:
      ValueError: there is no such module.
    """
    module_name, _, attribute = source.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"{source}: {module_name!r} is not a valid module name; write module:name")
    try:
        return importlib.import_module(module_name), attribute
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise
        raise ValueError(f"{source}: there is no module {module_name} on the Python path") from None


def make_named(source: str) -> Any:
    """Returns the object "module:name"; calls it if it is a class or a function.

    Raises:
      ValueError: there is no such module or name.
    """
    module, name = import_module_of(source)
    if not hasattr(module, name):
        raise ValueError(f"{source}: module {module.__name__} has no {name}")
    found = getattr(module, name)
    return found() if callable(found) else found
