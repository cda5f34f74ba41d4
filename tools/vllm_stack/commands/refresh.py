"""``vllm-stack refresh``: the commits of a checkout, written back as patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.applying import apply_stack
from vllm_stack.checkout import Checkout
from vllm_stack.errors import LintError, StackError, UsageError, WorkInProgressError
from vllm_stack.options import (
    offline_option,
    require_one_target,
    selected_targets,
    stack_command,
    target_option,
)
from vllm_stack.refresh import RefreshPlan, carry_out, differing_exports, plan_refresh
from vllm_stack.report import Report
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class RefreshedFile:
    """One patch file, and what happened to it."""

    name: str
    action: str
    commit: str | None


@dataclass(frozen=True)
class RefreshedTarget:
    """What a refresh did, or with --check found, for one target."""

    target: str
    stack_id: str
    files: tuple[RefreshedFile, ...]
    written: bool
    differing: tuple[str, ...]
    """With --check: patches whose re-export differs from the file."""
    unrefreshed: tuple[str, ...]
    """With --check: what the checkout holds that no patch file has."""


@dataclass(frozen=True)
class RefreshReport(Report):
    """What the command did for all targets."""

    command: ClassVar[str] = "refresh"
    check: bool
    targets: tuple[RefreshedTarget, ...]

    def failure(self) -> StackError | None:
        """With --check, any difference is a failure."""
        details = [
            f"{done.target}: {name} is not what re-exporting it gives"
            for done in self.targets
            for name in done.differing
        ]
        details += [f"{done.target}: {line}" for done in self.targets for line in done.unrefreshed]
        if not details:
            return None
        return LintError(
            "the patch files are not what the commits give", details=details, hint="run `refresh`"
        )

    def render(self, console: Console) -> None:
        """Print what became of each file."""
        for done in self.targets:
            console.print(f"{done.target} stack {done.stack_id[:12]}", style="bold", markup=False)
            for file in done.files:
                console.print(f"  {file.name}: {file.action}", markup=False)


@target_option
@offline_option
@click.option(
    "--check", is_flag=True, help="Change nothing; fail when re-exporting a patch differs by a byte."
)
@click.option("--drop", multiple=True, metavar="FILE", help="Patch that may go; name each one.")
@click.option(
    "--test", default="python -m pytest tests", show_default=True, help="Test command of new patches."
)
def refresh(
    workspace: Workspace,
    targets: tuple[str, ...],
    *,
    offline: bool,
    check: bool,
    drop: tuple[str, ...],
    test: str,
) -> RefreshReport:
    """Write the commits of the checkout in upstream/TARGET back as patch files.

    Refuses with uncommitted work, without commits, and when a patch would vanish. A commit that was
    only rewritten (another id or date) leaves its file as it is. --check needs no checkout.

    Example: tools/vllm-stack refresh --check
    """
    names = selected_targets(workspace, targets)
    if not test.strip() or "\n" in test:
        raise UsageError("--test needs a command, in one line", hint="--test 'python -m pytest tests/...'")
    if check:
        return RefreshReport(check, tuple(_check(workspace, name, offline=offline) for name in names))
    if drop:
        require_one_target(names, "--drop")
    present = [name for name in names if targets or Checkout.find(workspace.checkout(name))]
    if not present:
        raise WorkInProgressError("there is no checkout to refresh from", hint="run `apply` first")
    # All that can be refused is refused before the first file is written.
    plans = [_plan(workspace, name, drop, test) for name in present]
    return RefreshReport(check, tuple(_carry_out(plan, checkout) for plan, checkout in plans))


def _plan(
    workspace: Workspace, target: str, drop: tuple[str, ...], test: str
) -> tuple[RefreshPlan, Checkout]:
    stack = Stack.load(workspace, target)
    checkout = Checkout.find(workspace.checkout(target))
    if checkout is None:
        raise WorkInProgressError(f"there is no checkout of {target}", hint="run `apply` first")
    return plan_refresh(stack, checkout, drop, test), checkout


def _carry_out(plan: RefreshPlan, checkout: Checkout) -> RefreshedTarget:
    carry_out(plan, checkout)
    files = tuple(RefreshedFile(file.name, file.action, file.commit) for file in plan.files)
    written = plan.changes_anything
    return RefreshedTarget(plan.stack.target, plan.result.stack_id, files, written, (), ())


def _check(workspace: Workspace, target: str, *, offline: bool) -> RefreshedTarget:
    stack = Stack.load(workspace, target)
    applied = apply_stack(base_of(workspace, stack.pin, offline=offline), stack)
    differing = differing_exports(stack, applied)
    files = tuple(
        RefreshedFile(patch.name, "differs" if patch.name in differing else "same", patch.commit)
        for patch in applied.patches
    )
    return RefreshedTarget(
        target,
        stack.stack_id,
        files,
        written=False,
        differing=differing,
        unrefreshed=_unrefreshed(workspace, target),
    )


def _unrefreshed(workspace: Workspace, target: str) -> tuple[str, ...]:
    checkout = Checkout.find(workspace.checkout(target))
    if checkout is None:
        return ()
    lines = [f"uncommitted: {line}" for line in checkout.git.status()]
    if checkout.head != checkout.state.head:
        lines.append(f"the commits in {checkout.folder} are newer than the patch files")
    return tuple(lines)


command = stack_command("refresh")(refresh)
