"""Patches that a person amended: which of the old code's contracts their code still has."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_stack.contracts import ContractFinding
    from vllm_stack.replay import PatchPlace


def still_relies(place: PatchPlace, finding: ContractFinding) -> bool:
    """Say whether the code of a patch, as it is on the new release, still has what a finding is about.

    A contract is derived from the patch's code on its own release; where a person changed the statement
    that it was derived from, it says nothing about what stands there now. Contracts of the series count
    until they are changed there, and what was found in the amended code itself counts as it is.
    """
    if finding.origin == "series" or finding.read_at is not None or finding.line is None:
        return True
    if place.new_after is None:
        return True
    now = place.git.entry(place.new_after, finding.path)
    if now is None or now.kind != "blob":
        return False
    before = place.git.blob(place.old_after, finding.path)
    return statement_at(before.decode("utf-8", "replace"), finding.line) in _plain(
        place.git.data(now.id).decode("utf-8", "replace")
    )


def statement_at(source: str, line: int) -> str:
    """Return the statement around a line (from 1); of one that has a body, what stands before it."""
    lines = source.splitlines()
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return _plain(lines[line - 1])
    spans = (_span(node) for node in ast.walk(tree) if isinstance(node, ast.stmt))
    around = [span for span in spans if span[0] <= line <= span[1]]
    first, last = min(around, key=lambda span: span[1] - span[0], default=(line, line))
    return _plain("\n".join(lines[first - 1 : last]))


def _span(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and body[0].lineno > node.lineno:
        return node.lineno, body[0].lineno - 1
    return node.lineno, node.end_lineno or node.lineno


def _plain(text: str) -> str:
    """Return text without what only lays it out."""
    return "\n".join(line.strip() for line in text.splitlines())
