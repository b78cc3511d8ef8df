"""An extension of griffe: the reference shows the comment of a record's field as the field's description."""

import ast
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Takes the comment at the end of the field's line, or the line before it, as the docstring of the field."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **kwargs: Any) -> None:
        if attr.docstring or not isinstance(node, ast.AnnAssign) or not isinstance(attr.parent, griffe.Class):
            return
        lines = attr.lines_collection[attr.filepath]
        before, line = lines[node.lineno - 2].strip(), lines[node.end_lineno - 1][node.end_col_offset :]
        comment = line.partition("#")[2].strip() or (before.removeprefix("# ") if before.startswith("# ") else "")
        if comment:
            attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:], parent=attr)
