"""Makes the tables of settings from the fields of the dataclasses, their docstrings and the values that they accept."""

import ast
import dataclasses
import inspect
import itertools
import math
import typing
from typing import Any

import jppo
from jppo.config.ppo import RANGES

ADVANCED = ("num_strata", "staggered_start", "compute_dtype")
_VALUES = {
    "run_dir": "path",
    "address": "`auto`, `host:port` or `ray://host:port`",
    "callback": "function",
    "progress": '`"auto"`, `"none"` or a `Reporter`',
    "hidden_sizes": "whole numbers ≥ 1",
    "actor_obs": "names",
    "critic_obs": "names",
}
_HEAD = "| name | default | values | meaning |\n|---|---|---|---|\n"


def tables(name: str) -> str:
    """Returns the tables of a dataclass of jppo in Markdown: its usual and its advanced settings."""
    kind = getattr(jppo, name)
    docs = field_docs(kind)
    rows = {field.name: _row(kind, field, docs[field.name]) for field in dataclasses.fields(kind)}
    advanced = "".join(rows.pop(field) for field in ADVANCED if field in rows)
    text = _HEAD + "".join(rows.values())
    return f"{text}\n### Advanced\n\n{_HEAD}{advanced}" if advanced else text


def field_docs(kind: type) -> dict[str, str]:
    """Returns the docstring of each field."""
    body = ast.parse(inspect.getsource(kind)).body[0].body
    pairs = itertools.pairwise(body)
    return {a.target.id: " ".join(b.value.value.split()) for a, b in pairs if isinstance(a, ast.AnnAssign)}


def _row(kind: type, field: dataclasses.Field[Any], doc: str) -> str:
    """Returns the row of a field. Its docstring can describe the default in a sentence."""
    meaning, _, described = doc.partition(" Default: ")
    default, _, rest = described.partition(". ")
    meaning, default = f"{meaning} {rest}".strip(), default.removesuffix(".") or f"`{field.default}`"
    cells = (f"`{field.name}`", default, accepted_values(kind, field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |\n"


def accepted_values(kind: type, field: dataclasses.Field[Any]) -> str:
    """Returns the values of a field: its choices, or a range of numbers."""
    kinds = [field.type, *typing.get_args(field.type)]
    if field.name in _VALUES:
        return _VALUES[field.name]
    if bool in kinds:
        return "`True`, `False`"
    if typing.get_origin(field.type) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(field.type))
    return _documented_range(*RANGES[field.name]) if kind is jppo.Hyperparams else _probed_range(kind, field, kinds)


def _documented_range(low: float, high: float, closed: bool) -> str:
    if high < math.inf:
        return f"{low:g} to {high:g}"
    return "any number" if low == -math.inf else f"{'≥' if closed else '>'} {low:g}"


def _probed_range(kind: type, field: dataclasses.Field[Any], kinds: list[Any]) -> str:
    """Returns the numbers with which the class can be made."""

    def accepts(value: float) -> bool:
        try:
            kind(**{field.name: value})
        except ValueError:
            return False
        return True

    if accepts(-1):
        return "any number"
    if int in kinds:
        return "≥ 0" if accepts(0) else "≥ 1"
    low = "≥ 0" if accepts(0) else "> 0"
    highest = next(value for value in (1e9, 1, 0.5) if accepts(value))
    return low if highest == 1e9 else f"{low}, ≤ {highest:g}"
