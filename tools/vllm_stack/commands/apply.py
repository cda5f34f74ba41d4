"""``vllm-stack apply``: a checkout with one commit per patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.applying import AppliedPatch, apply_in, describe, try_stack
from vllm_stack.checkout import Checkout, create_checkout, fetch_base
from vllm_stack.errors import ConflictError, WorkInProgressError
from vllm_stack.options import offline_option, selected_targets, stack_command, target_option
from vllm_stack.report import Report
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.git import Git
    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class AppliedTarget:
    """The checkout of one target."""

    target: str
    release: str
    stack_id: str
    folder: str
    base: str
    head: str
    patches: tuple[AppliedPatch, ...]
    saved: str | None
    """Ref that holds work which --force moved out of the way."""


@dataclass(frozen=True)
class ApplyReport(Report):
    """The checkouts that the command made or moved."""

    command: ClassVar[str] = "apply"
    targets: tuple[AppliedTarget, ...]

    def render(self, console: Console) -> None:
        """Print one line per patch."""
        for done in self.targets:
            console.print(f"[bold]{done.target} {done.release}[/bold] in {done.folder}")
            for patch in done.patches:
                console.print(f"  {(patch.commit or '')[:12]} {patch.name} ({patch.outcome})", markup=False)
            if done.saved:
                console.print(f"  earlier work is kept under {done.saved}")


@target_option
@offline_option
@click.option("--three-way", is_flag=True, help="Accept patches that apply at an offset or by merging.")
@click.option(
    "--force", is_flag=True, help="Move commits and uncommitted work aside, under refs/stack/saved."
)
def apply(
    workspace: Workspace, targets: tuple[str, ...], *, offline: bool, three_way: bool, force: bool
) -> ApplyReport:
    """Make a checkout in upstream/TARGET with one commit per patch on the pinned base.

    Edit there, commit with `git commit --fixup`, squash with `git rebase -i --autosquash
    refs/stack/base`, and write the patches back with `vllm-stack refresh`.

    Example: tools/vllm-stack apply --target vllm
    """
    return ApplyReport(
        tuple(
            _apply_target(workspace, target, offline=offline, three_way=three_way, force=force)
            for target in selected_targets(workspace, targets)
        )
    )


def _apply_target(
    workspace: Workspace, target: str, *, offline: bool, three_way: bool, force: bool
) -> AppliedTarget:
    stack = Stack.load(workspace, target)
    folder = workspace.checkout(target)
    existing = Checkout.find(folder)
    saved = _make_room(existing, force=force) if existing else None
    base = base_of(workspace, stack.pin, offline=offline)
    # The stack is applied in the cache first: a conflict leaves the checkout as it was.
    results = _apply(base.git, base.commit, stack, three_way=three_way)
    checkout = existing or create_checkout(folder, target, base)
    fetch_base(checkout.git, base)
    head = next((result.commit for result in reversed(results) if result.commit), base.commit)
    checkout.git.run("fetch", "--quiet", "--no-tags", base.git.git_dir or "", head)
    names = {result.commit: result.name for result in results if result.commit}
    checkout.with_base(base.commit).record(head, stack.stack_id, names).move_to(head)
    return AppliedTarget(
        target, stack.pin.release, stack.stack_id, str(folder), base.commit, head, results, saved
    )


def _apply(git: Git, base: str, stack: Stack, *, three_way: bool) -> tuple[AppliedPatch, ...]:
    if not three_way:
        return apply_in(git, base, stack).patches
    results = try_stack(git, base, stack.patches)
    if not all(result.outcome.applied for result in results):
        raise ConflictError(
            f"the stack of {stack.target} does not apply to {stack.pin.release}, not even three-way",
            details=[line for result in results for line in describe(result)],
        )
    return results


def _make_room(checkout: Checkout, *, force: bool) -> str | None:
    """Refuse to go on when the checkout holds work; with ``force`` keep it under a ref instead."""
    checkout.require_no_operation()
    dirty, moved = checkout.git.status(), checkout.head != checkout.state.head
    if not dirty and not moved:
        return None
    if force:
        return checkout.save_work()
    if dirty:
        checkout.require_clean()
    raise WorkInProgressError(
        f"{checkout.folder} holds commits that are not in patch files yet",
        details=checkout.git.run("log", "--format=%h %s", f"{checkout.state.head}..HEAD").lines,
        hint="`refresh` writes them back; `apply --force` keeps them under refs/stack/saved",
    )


command = stack_command("apply")(apply)
