"""Short texts of results, for consoles and notebooks."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jppo.config.checks import check_path
from jppo.runs.run_dir import write_output


def show_record(kind: str, fields: Mapping[str, Any]) -> str:
    """Returns one line with the fields, for `__repr__`."""
    return f"{kind}({', '.join(f'{name}={_show(value)}' for name, value in fields.items())})"


def show_count(number: int, noun: str) -> str:
    """Returns a number with its noun, which is in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def html_table(title: str, *rows: Mapping[str, Any]) -> str:
    """Returns a table with one row per mapping, for `_repr_html_`. All mappings have the same keys."""
    lines: list[Sequence[str]] = [
        [f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ())],
        *([f"<td>{html.escape(v if isinstance(v, str) else _show(v))}</td>" for v in row.values()] for row in rows),
    ]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f"<table><caption>{html.escape(title)}</caption>{body}</table>"


class DisplayedResult:
    """Base class of results that show the fields `_displayed` in one line, and as a table in notebooks."""

    @property
    def _displayed(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return show_record(type(self).__name__, self._displayed)

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._displayed)


class Picture(NamedTuple):
    """A picture or an animation. Notebooks show it."""

    data: bytes
    """Content of the file."""
    kind: str
    """png or gif."""
    description: str
    """The text that a browser shows if it cannot show the picture."""

    def save(self, path: str | Path) -> None:
        """Writes the picture to a file. Raises ValueError if its name has another ending or it cannot be written."""
        write_output(check_path("path", path), self.data, f".{self.kind}")

    def __repr__(self) -> str:
        return f"Picture({self.kind}, {len(self.data):,} bytes, {self.description!r})"

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.data).decode()
        return f'<img src="data:image/{self.kind};base64,{data}" alt="{html.escape(self.description)}">'


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
