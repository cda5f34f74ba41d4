"""Moving a checkout to another release, and back: nothing of it is lost either way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.base import BASE_REF
from vllm_stack.checkout import BRANCH, NOTES_REF, Checkout, bring_commit, read_state_bytes, write_state_bytes
from vllm_stack.errors import WorkInProgressError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_stack.base import Base
    from vllm_stack.git import Git
    from vllm_stack.stack import Stack

_REFS = (f"refs/heads/{BRANCH}", BASE_REF, NOTES_REF)


@dataclass(frozen=True)
class Snapshot:
    """Where a checkout was."""

    head: str
    symbolic: str | None
    """The ref that HEAD names; None for a detached one."""
    refs: dict[str, str | None]
    state: str
    """What the tools had written down about it."""

    @classmethod
    def of(cls, checkout: Checkout) -> Snapshot:
        """Write down where ``checkout`` is."""
        git = checkout.git
        named = git.run("symbolic-ref", "--quiet", "HEAD", check=False)
        refs = {ref: _value(git, ref) for ref in _REFS}
        return cls(checkout.head, named.text or None, refs, read_state_bytes(checkout.folder).decode())


def _value(git: Git, ref: str) -> str | None:
    return git.run("rev-parse", "--verify", "--quiet", ref, check=False).text or None


def require_in_step(checkout: Checkout) -> None:
    """Raise WorkInProgressError, with a list, when a checkout holds what no patch file has."""
    checkout.require_no_operation()
    checkout.require_clean()
    _require_saved(checkout)


def _require_saved(checkout: Checkout, *saved: str) -> None:
    """Raise WorkInProgressError for commits that moving the branch would leave without a name."""
    commits = checkout.unsaved_commits(*saved)
    if commits:
        raise WorkInProgressError(
            f"{checkout.folder} holds commits that are not in patch files yet",
            details=commits,
            hint="`refresh` writes them back; `apply --force` keeps them under refs/stack/saved",
        )


def move_forward(checkout: Checkout, base: Base, head: str, stack: Stack, names: Mapping[str, str]) -> None:
    """Bring ``stack``, whose last commit is ``head``, from the repository of ``base`` into the checkout.

    May be run again after an interruption.
    """
    interrupted = _settle_interruption(checkout)
    _require_saved(checkout)
    bring_commit(checkout.git, base, base.commit)
    bring_commit(checkout.git, base, head)
    moved = checkout.with_base(base.commit)
    moved.move_to(head, force=interrupted)
    moved.record(head, stack, names)


def move_back(checkout: Checkout, before: Snapshot) -> None:
    """Put a checkout back to where it was, also from the middle of :func:`move_forward`."""
    git = checkout.git
    require_no_loss(checkout, before)
    if Snapshot.of(checkout) == before:
        return
    # This also writes down that the checkout is being moved, should it be interrupted again.
    checkout.move_to(before.head, force=True)
    for ref, value in before.refs.items():
        words = ("update-ref", ref, value) if value else ("update-ref", "-d", ref)
        git.run(*words)
    if before.symbolic:
        git.run("symbolic-ref", "HEAD", before.symbolic)
    write_state_bytes(checkout.folder, before.state.encode())


def require_no_loss(checkout: Checkout, before: Snapshot) -> None:
    """Raise WorkInProgressError, with a list, when moving a checkout back would lose somebody's work."""
    interrupted = _settle_interruption(checkout)
    if Snapshot.of(checkout) == before:
        return
    if interrupted:
        _require_saved(checkout, before.head)
    else:
        require_in_step(checkout)


def _settle_interruption(checkout: Checkout) -> bool:
    """Say whether a move was interrupted, and clear the way for git to go on.

    WorkInProgressError when there is also work of somebody's.
    """
    _unlock(checkout, *_REFS, "packed-refs")
    if checkout.state.pending is None:
        return False
    _unlock(checkout, "index", "HEAD")
    if not checkout.left_by_interruption():
        raise WorkInProgressError(
            f"there is uncommitted work in {checkout.folder}, which a rebase was moving",
            details=checkout.git.status(),
            hint="save what is yours elsewhere, put those files back, and run the same command again",
        )
    return True


def _unlock(checkout: Checkout, *names: str) -> None:
    """Remove the locks that a git leaves that is killed; it was ours that worked on what they guard."""
    folder = checkout.folder / ".git"
    for left in (*(folder / f"{name}.lock" for name in names), *folder.glob(".vllm-stack.json.*.part")):
        left.unlink(missing_ok=True)
