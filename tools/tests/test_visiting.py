"""Going through syntax trees: all that `ast` would show, but for what holds no code."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from vllm_stack import patch, replay
from vllm_stack.contracts import check, reaching, resolve, usage
from vllm_stack.contracts.visiting import Visitor, walk

if TYPE_CHECKING:
    from types import ModuleType

_PLAIN = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
#: Syntax that our own modules hardly use.
RARE = """
@decorated(1, *a, k=2, **b)
async def f(a, /, b: int = 1, *c, d, e=2, **g) -> list[int]:
    async with x as y, z: await y
    async for _ in x: pass
    return {**m, 1: -2}, {i async for i in x if i < 3 <= 4}, lambda q=1, *r: (yield), x[1:2, ...]
class C(B, metaclass=M):
    global h; h: int = f"{x!r:>{w}} {y}"
match p:
    case [1, *rest] | {"k": v, **others} if v: del v
    case Point(x=0) as whole: raise E from None
try: assert not (n := 1), "no"
except* (A, B) as error: x += 1
"""


class _Seen(Visitor):
    def __init__(self) -> None:
        self.nodes: list[ast.AST] = []

    def visit(self, node: ast.AST) -> None:
        self.nodes.append(node)
        super().visit(node)


def _shown(nodes: list[ast.AST]) -> Counter[str]:
    return Counter(ast.dump(node) for node in nodes)


@pytest.mark.parametrize("module", [check, patch, reaching, replay, resolve, usage, None])
def test_every_node_with_code_is_seen_once(module: ModuleType | None) -> None:
    tree = ast.parse(RARE if module is None else inspect.getsource(module))
    expected = [node for node in ast.walk(tree) if not isinstance(node, _PLAIN)]
    seen = _Seen()
    seen.visit(tree)
    assert _shown(seen.nodes) == _shown(expected)
    assert _shown(list(walk(tree))) == _shown(expected)


def test_nodes_are_visited_in_the_order_of_ast() -> None:
    class Plain(ast.NodeVisitor):
        def __init__(self) -> None:
            self.nodes: list[ast.AST] = []

        def visit(self, node: ast.AST) -> None:
            if not isinstance(node, _PLAIN):
                self.nodes.append(node)
            super().visit(node)

    tree = ast.parse(RARE)
    plain, seen = Plain(), _Seen()
    plain.visit(tree)
    seen.visit(tree)
    assert seen.nodes == plain.nodes
