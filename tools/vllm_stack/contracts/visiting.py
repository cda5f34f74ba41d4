"""Going through syntax trees as `ast` does, in less time: most of what checking contracts takes is this."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Fields that hold no code: names, operators, and what an expression is for.
_PLAIN = frozenset({"attr", "ctx", "id", "kind", "op", "ops", "type_comment"})

_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}


def _fields(node: ast.AST) -> tuple[str, ...]:
    """Return the fields of a node that may hold code."""
    kind = type(node)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(name for name in kind._fields if name not in _PLAIN)
    return _FIELDS[kind]


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes right below a node, operators and contexts left out."""
    for name in _fields(node):
        value = getattr(node, name, None)
        if isinstance(value, list):
            for item in value:
                if isinstance(item, ast.AST):
                    yield item
        elif isinstance(value, ast.AST):
            yield value


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, in no particular order."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        waiting.extend(children(node))
        yield node


class Visitor(ast.NodeVisitor):
    """A visitor that is not told of operators and contexts."""

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the nodes right below a node."""
        for child in children(node):
            self.visit(child)
