"""``vllm-stack lint``: the rules of the stacks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_stack.errors import LintError, StackError
from vllm_stack.lint import ClassifiedPath, Finding, classified_paths, lint_stack
from vllm_stack.options import selected_targets, stack_command, target_option
from vllm_stack.report import Report
from vllm_stack.stack import Stack

if TYPE_CHECKING:
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
            for finding in linted.findings:
                console.print(f"  {finding.level}: {finding}", markup=False)


@target_option
def lint(workspace: Workspace, targets: tuple[str, ...]) -> LintReport:
    """Check names, numbers, trailers, form and paths of all patches, without applying them.

    Example: tools/vllm-stack lint --json -
    """
    return LintReport(tuple(_lint(workspace, name) for name in selected_targets(workspace, targets)))


def _lint(workspace: Workspace, target: str) -> LintedTarget:
    stack = Stack.load(workspace, target)
    names = tuple(patch.name for patch in stack.patches)
    return LintedTarget(target, stack.stack_id, names, tuple(lint_stack(stack)), classified_paths(stack))


command = stack_command("lint")(lint)
