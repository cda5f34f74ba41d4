"""``vllm-stack apply``: a checkout with one commit per patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.applying import AppliedPatch, Outcome, advice, apply_stack, describe, try_stack
from vllm_stack.checkout import Checkout, bring_commit, create_checkout
from vllm_stack.errors import ConflictError, UsageError, WorkInProgressError
from vllm_stack.options import (
    offline_option,
    require_one_target,
    selected_targets,
    stack_command,
    target_option,
)
from vllm_stack.report import Report
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from vllm_stack.base import Base
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
            console.print(f"{done.target} {done.release} in {done.folder}", style="bold", markup=False)
            for patch in done.patches:
                console.print(f"  {(patch.commit or '')[:12]} {patch.name} ({patch.outcome})", markup=False)
            if done.saved:
                console.print(f"  earlier work is kept under {done.saved}", markup=False)
            for patch in done.patches:
                if patch.commit is None:
                    console.print(
                        f"  left out: `refresh --target {done.target} --drop {patch.name}` "
                        "takes it off the stack",
                        markup=False,
                    )


@target_option
@offline_option
@click.option("--three-way", is_flag=True, help="Accept patches that apply at an offset or by merging.")
@click.option(
    "--drop", multiple=True, metavar="FILE", help="Leave out a patch that changes nothing any more."
)
@click.option(
    "--force", is_flag=True, help="Move commits and uncommitted work aside, under refs/stack/saved."
)
def apply(
    workspace: Workspace,
    targets: tuple[str, ...],
    *,
    offline: bool,
    three_way: bool,
    drop: tuple[str, ...],
    force: bool,
) -> ApplyReport:
    """Make a checkout in upstream/TARGET with one commit per patch on the pinned base.

    Edit there, commit with `git commit --fixup`, squash with `git rebase -i --autosquash
    refs/stack/base`, and write the patches back with `vllm-stack refresh`. When interrupted, run the
    same command again.

    Example: tools/vllm-stack apply --target vllm
    """
    names = selected_targets(workspace, targets)
    if drop:
        require_one_target(names, "--drop")
    # All that can be refused is refused before the first checkout moves.
    plans = [_plan(workspace, name, offline=offline, three_way=three_way, drop=drop) for name in names]
    if not force:
        for plan in plans:
            _require_nothing_is_lost(plan.checkout)
    return ApplyReport(tuple(_carry_out(plan, force=force) for plan in plans))


@dataclass(frozen=True)
class _Plan:
    """A stack that applies, and the checkout that it goes to."""

    stack: Stack
    folder: Path
    checkout: Checkout | None
    base: Base
    results: tuple[AppliedPatch, ...]

    @property
    def head(self) -> str:
        """The commit of the last patch."""
        return next((result.commit for result in reversed(self.results) if result.commit), self.base.commit)


def _plan(
    workspace: Workspace, target: str, *, offline: bool, three_way: bool, drop: tuple[str, ...]
) -> _Plan:
    stack = Stack.load(workspace, target)
    for name in sorted(set(drop) - {patch.name for patch in stack.patches}):
        raise UsageError(f"--drop {name}: the stack of {target} has no such patch")
    folder = workspace.checkout(target)
    checkout = Checkout.find(folder)
    if checkout is not None:
        checkout.require_no_operation()
    base = base_of(workspace, stack.pin, offline=offline)
    # In the cache, so that a conflict leaves the checkout as it was.
    results = _apply(base, stack, three_way=three_way, drop=drop)
    return _Plan(stack, folder, checkout, base, results)


def _apply(base: Base, stack: Stack, *, three_way: bool, drop: tuple[str, ...]) -> tuple[AppliedPatch, ...]:
    if not three_way and not drop:
        return apply_stack(base, stack).patches
    results = try_stack(base.git, base.commit, stack.patches)
    accepted = (Outcome.STRICT, Outcome.OFFSET, Outcome.THREE_WAY) if three_way else (Outcome.STRICT,)
    dropped = [result.name for result in results if result.outcome is Outcome.ABSORBED]
    if all(
        result.outcome in accepted or (result.name in drop and result.name in dropped) for result in results
    ):
        return results
    raise ConflictError(
        f"the stack of {stack.target} does not apply to {stack.pin.release}",
        details=[line for result in results for line in describe(result)],
        hint=advice(stack.target, results),
    )


def _require_nothing_is_lost(checkout: Checkout | None) -> None:
    if checkout is None or checkout.left_by_interruption():
        return
    checkout.require_clean()
    commits = checkout.unsaved_commits()
    if commits:
        raise WorkInProgressError(
            f"{checkout.folder} holds commits that are not in patch files yet",
            details=commits,
            hint="`refresh` writes them back; `apply --force` keeps them under refs/stack/saved",
        )


def _carry_out(plan: _Plan, *, force: bool) -> AppliedTarget:
    existing, saved, interrupted = plan.checkout, None, False
    if existing is not None:
        interrupted = existing.left_by_interruption()
        if force and (existing.git.status() or existing.unsaved_commits()):
            saved = existing.save_work()
    checkout = existing or create_checkout(plan.folder, plan.stack.target, plan.base)
    bring_commit(checkout.git, plan.base, plan.base.commit)
    bring_commit(checkout.git, plan.base, plan.head)
    checkout = checkout.with_base(plan.base.commit)
    checkout.move_to(plan.head, force=force or interrupted)
    names = {result.commit: result.name for result in plan.results if result.commit}
    checkout.record(plan.head, plan.stack, names)
    stack = plan.stack
    return AppliedTarget(
        stack.target,
        stack.pin.release,
        stack.stack_id,
        str(plan.folder),
        plan.base.commit,
        plan.head,
        plan.results,
        saved,
    )


command = stack_command("apply")(apply)
