"""Finds the types of jppo that the annotations of its public names contain."""

import inspect
import typing
from collections.abc import Iterator
from typing import Any

import jppo
from jppo.actors.sebulba import Sebulba


def reachable_types() -> dict[type, str]:
    """Returns the types of jppo in the annotations of public names, of their members and of these types.

    The values name the owner of an annotation with the type.
    """
    owners = [(name, getattr(jppo, name)) for name in jppo.__all__]
    found: dict[type, str] = {}
    while owners:
        name, owner = owners.pop()
        for kind in _types_of(owner):
            if kind not in found:
                found[kind] = name
                owners.append((kind.__qualname__, kind))
    return found


def _types_of(owner: Any) -> Iterator[type]:
    """Yields the types in the annotations of a function, or of the public members of a class or a module."""
    if inspect.isfunction(owner):
        for annotation in _hints(owner).values():
            yield from _types_in(annotation)
    elif isinstance(owner, type):
        for annotation in _hints(owner).values():
            yield from _types_in(annotation)
        for member in _members(owner):
            yield from _types_of(getattr(member, "fget", getattr(member, "__func__", member)))
    elif inspect.ismodule(owner):
        for member in _members(owner):
            if getattr(member, "__module__", None) == owner.__name__:
                yield from _types_of(member)


def _members(owner: Any) -> list[Any]:
    return [member for name, member in vars(owner).items() if not name.startswith("_")]


def _hints(owner: Any) -> dict[str, Any]:
    return typing.get_type_hints(owner, localns={"Sebulba": Sebulba})


def _types_in(annotation: Any) -> Iterator[type]:
    """Yields the classes of jppo that an annotation contains, for example as arguments of `Callable` and `dict`."""
    if isinstance(annotation, list):
        for part in annotation:
            yield from _types_in(part)
    elif isinstance(annotation, type) and annotation.__module__.startswith("jppo."):
        yield annotation
    else:
        for part in typing.get_args(annotation):
            yield from _types_in(part)
