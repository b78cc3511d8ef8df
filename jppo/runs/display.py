"""Short texts of results, for consoles and notebooks."""

import html
from collections.abc import Mapping, Sequence
from typing import Any


def show_record(kind: str, fields: Mapping[str, Any]) -> str:
    """Returns one line with the fields, for `__repr__`."""
    return f"{kind}({', '.join(f'{name}={_show(value)}' for name, value in fields.items())})"


def html_table(title: str, *rows: Mapping[str, Any]) -> str:
    """Returns a table with one row per mapping, for `_repr_html_`. All mappings have the same keys."""
    lines: list[Sequence[str]] = [
        [f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ())],
        *([f"<td>{html.escape(_show(value).strip(chr(39)))}</td>" for value in row.values()] for row in rows),
    ]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f"<table><caption>{html.escape(title)}</caption>{body}</table>"


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
