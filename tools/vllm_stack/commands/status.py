"""``vllm-stack status``: what is pinned, stacked and checked out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_stack.base import Base
from vllm_stack.checkout import Checkout
from vllm_stack.options import selected_targets, stack_command, target_option
from vllm_stack.report import Report
from vllm_stack.session import Session
from vllm_stack.stack import Stack
from vllm_stack.version import wheel_version

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class PatchStatus:
    """One patch."""

    name: str
    topic: str
    subject: str
    upstream_status: str
    paths: tuple[str, ...]
    written_contracts: int
    """How many contracts the series has for it; `lint` lists them with the derived ones."""


@dataclass(frozen=True)
class CheckoutStatus:
    """The checkout of a target."""

    folder: str
    head: str
    operation: str | None
    uncommitted: tuple[str, ...]
    newer_than_patches: bool
    older_than_patches: bool


@dataclass(frozen=True)
class RebaseStatus:
    """A rebase that is open."""

    release: str
    waits_at: str | None
    """The patch that a person has to decide about."""
    tree: str


@dataclass(frozen=True)
class TargetStatus:
    """One target."""

    target: str
    release: str
    version: str
    stack_id: str
    base_imported: bool
    patches: tuple[PatchStatus, ...]
    checkout: CheckoutStatus | None
    rebase: RebaseStatus | None


@dataclass(frozen=True)
class StatusReport(Report):
    """All targets."""

    command: ClassVar[str] = "status"
    cache: str
    targets: tuple[TargetStatus, ...]

    def render(self, console: Console) -> None:
        """Print one block per target."""
        console.print(f"cache: {self.cache}", markup=False)
        for target in self.targets:
            title = f"{target.target} {target.release} -> {target.version}"
            console.print(title, style="bold", markup=False)
            console.print(f"  stack {target.stack_id}", markup=False)
            for patch in target.patches:
                console.print(f"  {patch.name}: {patch.subject} ({patch.upstream_status})", markup=False)
            console.print(f"  {_checkout_line(target.checkout)}", markup=False)
            if target.rebase:
                console.print(f"  {_rebase_line(target.rebase)}", markup=False)


def _rebase_line(rebase: RebaseStatus) -> str:
    where = f"waits at {rebase.waits_at}, in {rebase.tree}" if rebase.waits_at else "was interrupted"
    return f"rebase to {rebase.release} {where}: `rebase-upstream --continue` or `--abort`"


def _checkout_line(checkout: CheckoutStatus | None) -> str:
    if checkout is None:
        return "no checkout"
    marks = [
        *([f"{checkout.operation} under way"] if checkout.operation else []),
        *([f"{len(checkout.uncommitted)} uncommitted changes"] if checkout.uncommitted else []),
        *(["commits not refreshed yet"] if checkout.newer_than_patches else []),
        *(["patch files changed since apply"] if checkout.older_than_patches else []),
    ]
    return f"checkout {checkout.folder} at {checkout.head[:12]}: {', '.join(marks) or 'in step'}"


@target_option
def status(workspace: Workspace, targets: tuple[str, ...]) -> StatusReport:
    """Show each target's pin, stack, version, checkout and open rebase. Touches nothing, needs no network.

    Example: tools/vllm-stack status
    """
    names = selected_targets(workspace, targets)
    return StatusReport(str(workspace.cache), tuple(_status(workspace, name) for name in names))


def _status(workspace: Workspace, target: str) -> TargetStatus:
    stack = Stack.load(workspace, target)
    patches = tuple(
        PatchStatus(
            patch.name,
            patch.topic or "",
            patch.subject,
            patch.trailer("Upstream-Status") or "",
            patch.paths,
            len(entry.contracts),
        )
        for patch, entry in zip(stack.patches, stack.series.patches, strict=True)
    )
    return TargetStatus(
        target,
        stack.pin.release,
        str(wheel_version(stack.stack_id, stack.pin.release, stack.releases)),
        stack.stack_id,
        Base.find(workspace, stack.pin) is not None,
        patches,
        _checkout_status(workspace, stack),
        _rebase_status(workspace, target),
    )


def _rebase_status(workspace: Workspace, target: str) -> RebaseStatus | None:
    session = Session.find(workspace, target)
    if session is None:
        return None
    stop = session.state.stop
    return RebaseStatus(session.state.new, stop.patch if stop else None, str(session.tree.work_tree))


def _checkout_status(workspace: Workspace, stack: Stack) -> CheckoutStatus | None:
    checkout = Checkout.find(workspace.checkout(stack.target))
    if checkout is None:
        return None
    return CheckoutStatus(
        str(checkout.folder),
        checkout.head,
        checkout.in_progress(),
        tuple(checkout.git.status()),
        newer_than_patches=checkout.head != checkout.state.head,
        older_than_patches=checkout.state.stack_id != stack.stack_id,
    )


command = stack_command("status")(status)
