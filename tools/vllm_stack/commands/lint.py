"""``vllm-stack lint``: the rules of the stacks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_stack.base import Base
from vllm_stack.contracts.linting import PatchContracts, contracts_on_pin
from vllm_stack.errors import LintError, StackError
from vllm_stack.lint import ClassifiedPath, Finding, classified_paths, lint_stack
from vllm_stack.options import selected_targets, stack_command, target_option
from vllm_stack.report import Report
from vllm_stack.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class LintedTarget:
    """What lint found in one stack."""

    target: str
    stack_id: str
    patches: tuple[str, ...]
    findings: tuple[Finding, ...]
    paths: tuple[ClassifiedPath, ...]
    contracts: tuple[PatchContracts, ...] | None
    """What each patch relies on; None while the sources of the pin are not imported."""


@dataclass(frozen=True)
class LintReport(Report):
    """What lint found."""

    command: ClassVar[str] = "lint"
    targets: tuple[LintedTarget, ...]

    def failure(self) -> StackError | None:
        """Errors fail, notes do not."""
        errors = sum(finding.is_error for linted in self.targets for finding in linted.findings)
        return LintError(f"{errors} errors in the patch stacks") if errors else None

    def render(self, console: Console) -> None:
        """Print the findings, and how many paths are of which class."""
        for linted in self.targets:
            kinds = Counter(path.kind.value for path in linted.paths)
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
            summary = f"{linted.target}: {len(linted.patches)} patches; paths: {counted}"
            console.print(summary, style="bold", markup=False)
            console.print(f"  contracts: {_counted(linted.contracts)}", markup=False)
            for finding in linted.findings:
                console.print(f"  {finding.level}: {finding}", markup=False)


@target_option
def lint(workspace: Workspace, targets: tuple[str, ...]) -> LintReport:
    """Check names, numbers, trailers, form and paths of all patches, and the contracts written for them.

    Contracts are looked up in the sources of the pin, once these are imported (`apply` does that).

    Example: tools/vllm-stack lint --json -
    """
    return LintReport(tuple(_lint(workspace, name) for name in selected_targets(workspace, targets)))


def _lint(workspace: Workspace, target: str) -> LintedTarget:
    stack = Stack.load(workspace, target)
    names = tuple(patch.name for patch in stack.patches)
    base = Base.find(workspace, stack.pin)
    contracts = None if base is None else contracts_on_pin(base, stack)
    findings = (*lint_stack(stack), *_lint_contracts(stack, contracts))
    return LintedTarget(target, stack.stack_id, names, findings, classified_paths(stack), contracts)


def _lint_contracts(stack: Stack, contracts: tuple[PatchContracts, ...] | None) -> Iterator[Finding]:
    """A written contract that is false on the pin could never warn of anything."""
    written = sum(len(entry.contracts) for entry in stack.series.patches)
    if contracts is None and written:
        message = f"{written} written contracts are not checked: `apply` imports the sources first"
        yield Finding("contract-unchecked", "note", None, message)
    for found in (false for patch in contracts or () for false in patch.false):
        message = f"not true of {stack.pin.release}: {found.contract}: {found.found}"
        yield Finding("contract", "error", found.patch, message)


def _counted(contracts: tuple[PatchContracts, ...] | None) -> str:
    if contracts is None:
        return "not looked at, the sources of the pin are not imported"
    origins = Counter(contract.origin for patch in contracts for contract in patch.contracts)
    return f"{origins['derived']} derived, {origins['series']} written"


command = stack_command("lint")(lint)
