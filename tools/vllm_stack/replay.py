"""Replaying a stack on another release: every patch gets a verdict, whatever became of the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from vllm_stack.applying import Outcome, commit_patch, describe, try_stack
from vllm_stack.carrying import Attempt, carry
from vllm_stack.errors import ConflictError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_stack.applying import AppliedPatch
    from vllm_stack.conflicts import FileConflict
    from vllm_stack.contracts import ContractFinding
    from vllm_stack.git import Git
    from vllm_stack.gitsource import History
    from vllm_stack.patch import Patch
    from vllm_stack.series import SeriesEntry
    from vllm_stack.stack import Stack


class Verdict(StrEnum):
    """What becomes of a patch on another release. Of several, the first in the order of trouble."""

    CLEAN = "clean"
    """Applies with equal context, perhaps at other line numbers; the outcome says which."""
    THREE_WAY = "three-way"
    """Applies by merging, or as a recorded resolution says."""
    ABSORBED = "absorbed"
    """Changes nothing: the new release has it."""
    CONFLICT = "conflict"
    CONTRACT_BROKEN = "contract-broken"
    """Applies, but what it relies on is no longer there."""
    MALFORMED = "malformed"

    @property
    def is_good(self) -> bool:
        """Whether nobody has to look at the patch."""
        return self in (Verdict.CLEAN, Verdict.THREE_WAY)


@dataclass(frozen=True)
class PatchPlace:
    """One patch between two releases: what every module that reports about it gets."""

    git: Git
    """A repository that holds all objects below."""
    entry: SeriesEntry
    patch: Patch
    old_base: str
    new_base: str
    """Commits of the two bare releases."""
    old_before: str
    old_after: str
    """Commits before and after the patch on its own release, the stack applied there."""
    new_before: str
    """The commit that it was applied to on the new release."""
    new_after: str | None
    """What that gave; for a conflict the files that merged, or None."""


@dataclass(frozen=True)
class ReplayedPatch:
    """What became of one patch on the new release."""

    name: str
    verdict: Verdict
    outcome: Outcome
    commit: str | None
    messages: tuple[str, ...] = ()
    resolution: str | None = None
    """Id of the recorded resolution that was used."""
    conflicts: tuple[FileConflict, ...] = ()
    contracts: tuple[ContractFinding, ...] = ()


@dataclass(frozen=True)
class Replay:
    """A whole stack on another release."""

    git: Git = field(repr=False)
    old_base: str
    new_base: str
    patches: tuple[ReplayedPatch, ...]
    places: tuple[PatchPlace, ...] = field(repr=False)
    """One for each patch, in the same order."""

    @property
    def head(self) -> str:
        """The commit of the last patch that applied (the new base when none did)."""
        commits = [patch.commit for patch in self.patches if patch.commit]
        return commits[-1] if commits else self.new_base

    @property
    def troubled(self) -> tuple[ReplayedPatch, ...]:
        """The patches that somebody has to look at."""
        return tuple(patch for patch in self.patches if not patch.verdict.is_good)


class Judge(Protocol):
    """What a replay asks about each patch, beyond whether it applies."""

    def conflicts(self, place: PatchPlace) -> tuple[FileConflict, ...]:
        """Explain the conflict of a patch."""

    def contracts(self, place: PatchPlace) -> tuple[ContractFinding, ...]:
        """Return the contracts of a patch that the new release breaks."""


@dataclass(frozen=True)
class Reports:
    """The judge that looks at everything; ``history`` also names upstream's commits."""

    history: History | None = None

    def conflicts(self, place: PatchPlace) -> tuple[FileConflict, ...]:  # noqa: ARG002
        """Explain the conflict of a patch."""
        return ()

    def contracts(self, place: PatchPlace) -> tuple[ContractFinding, ...]:  # noqa: ARG002
        """Return the contracts of a patch that the new release breaks."""
        return ()


def replay(git: Git, stack: Stack, old_base: str, new_base: str, *, history: History | None = None) -> Replay:
    """Carry all patches of ``stack`` from its own release to another, in a repository that has both.

    ``git`` is a workbench; the bases are commits. After a patch that does not apply the rest is tried on
    the tree without it. ConflictError when the stack does not even apply to its own release.
    """
    own = own_commits(git, stack, old_base)
    judge = Reports(history)
    head = new_base
    patches, places = [], []
    for place in places_of(git, stack, own, old_base, new_base):
        here = replace(place, new_before=head)
        attempt = carry(git, here.patch, here.old_before, here.old_after, head)
        done, here = judged(here, attempt, judge)
        patches.append(done)
        places.append(here)
        head = done.commit or head
    return Replay(git, old_base, new_base, tuple(patches), tuple(places))


def own_commits(git: Git, stack: Stack, old_base: str) -> tuple[AppliedPatch, ...]:
    """Apply a stack to its own release. ConflictError when a well-formed patch does not apply strictly."""
    own = try_stack(git, old_base, stack.patches)
    if any(result.outcome not in (Outcome.STRICT, Outcome.MALFORMED) for result in own):
        raise ConflictError(
            f"the stack of {stack.target} does not apply to its own release, {stack.pin.release}",
            details=[line for result in own for line in describe(result)],
            hint="bring it in order there first: `apply --three-way`, then `refresh`",
        )
    return own


def places_of(
    git: Git, stack: Stack, own: Sequence[AppliedPatch], old_base: str, new_base: str
) -> tuple[PatchPlace, ...]:
    """Return where each patch is on its own release; on the new one all are put on the bare release."""
    places = []
    before = old_base
    for entry, patch, result in zip(stack.series.patches, stack.patches, own, strict=True):
        after = result.commit or before
        places.append(PatchPlace(git, entry, patch, old_base, new_base, before, after, new_base, None))
        before = after
    return tuple(places)


def judged(place: PatchPlace, attempt: Attempt, judge: Judge) -> tuple[ReplayedPatch, PatchPlace]:
    """Give the verdict on an attempt, and return it with the place that reports are made from."""
    git, patch = place.git, place.patch
    tree = attempt.tree
    commit = None if tree is None else commit_patch(git, place.new_before, tree, patch)
    seen = replace(place, new_after=commit)
    applied = attempt.outcome.applied
    broken = () if commit is None else judge.contracts(seen)
    verdict = _verdict(attempt.outcome, broken)
    return (
        ReplayedPatch(
            patch.name,
            verdict,
            attempt.outcome,
            commit if applied else None,
            attempt.messages,
            conflicts=judge.conflicts(seen) if verdict is Verdict.CONFLICT else (),
            contracts=broken,
        ),
        seen,
    )


def _verdict(outcome: Outcome, broken: tuple[ContractFinding, ...]) -> Verdict:
    fixed = {
        Outcome.MALFORMED: Verdict.MALFORMED,
        Outcome.CONFLICT: Verdict.CONFLICT,
        Outcome.ABSORBED: Verdict.ABSORBED,
    }
    if outcome in fixed:
        return fixed[outcome]
    if broken:
        return Verdict.CONTRACT_BROKEN
    return Verdict.THREE_WAY if outcome is Outcome.THREE_WAY else Verdict.CLEAN
