"""Broken contracts for people, each like the error of a good compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_stack.conflictview import View, diff_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from vllm_stack.contracts.broken import ContractFinding

#: Further contracts that hang on a broken one, of which so many are shown; the JSON report has all.
_MOST_CONSEQUENCES = 8


def render_contracts(console: Console, patch: str, findings: Sequence[ContractFinding]) -> None:
    """Print the contracts of one patch that do not hold on the new release."""
    view = View(console)
    for finding in findings:
        where = finding.path if finding.line is None else f"{finding.path}:{finding.line}"
        view.heading("contract", f"{patch} {where}: {finding.contract}", "bold red")
        view.remark("expected", finding.expected)
        view.remark("found", finding.found)
        if finding.upstream_change:
            # The two lines that name the file are the title.
            title = f"upstream changed {finding.definition or finding.upstream_change[1][6:]}"
            view.section(title, diff_rows(finding.upstream_change[2:]))
        view.remarks(_notes(finding), finding.commits, ())
        view.gap()


def _notes(finding: ContractFinding) -> Iterator[str]:
    if finding.why:
        yield f"why it matters: {finding.why}"
    shown = finding.consequences[:_MOST_CONSEQUENCES]
    yield from (f"hangs on it: {consequence}" for consequence in shown)
    left = len(finding.consequences) - len(shown)
    if left:
        yield f"hangs on it: {left} more"
