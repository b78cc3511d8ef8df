"""An extension of griffe: the reference shows the comment of a record's field as the field's description."""

import ast
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Takes the comment at the end of the field's line as the docstring of the field."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **kwargs: Any) -> None:
        if attr.docstring or not isinstance(node, ast.AnnAssign) or not isinstance(attr.parent, griffe.Class):
            return
        line = attr.lines_collection[attr.filepath][node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        comment = line.partition("#")[2].strip()
        if comment and not comment.startswith(("noqa", "type:")):
            attr.docstring = griffe.Docstring(comment.replace("*", r"\*"), parent=attr)
