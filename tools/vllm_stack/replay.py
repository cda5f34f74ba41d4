"""Replaying a stack on another release: every patch gets a verdict, whatever became of the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from vllm_stack.amended import still_relies
from vllm_stack.applying import Outcome, commit_patch, describe, try_each, try_stack
from vllm_stack.carrying import Attempt, carry
from vllm_stack.collecting import without_collection
from vllm_stack.conflicts import explain_conflict
from vllm_stack.contracts import broken_contracts, explain_contracts, name_missing
from vllm_stack.errors import ConflictError
from vllm_stack.merging import Stages, sides
from vllm_stack.ownfiles import OwnFiles
from vllm_stack.resolutions import conflict_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from vllm_stack.applying import AppliedPatch
    from vllm_stack.conflicts import FileConflict
    from vllm_stack.contracts import BrokenContract, ContractFinding
    from vllm_stack.git import Git
    from vllm_stack.gitsource import History
    from vllm_stack.patch import Patch
    from vllm_stack.resolutions import Resolutions
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


class Ruling(StrEnum):
    """What a person decided about a patch that is not good as it is."""

    SKIPPED = "skipped"
    """It leaves the stack."""
    ABSORBED = "accepted-absorbed"
    """It leaves the stack because upstream has it."""
    CONTRACTS = "accepted-contracts"
    """It stays although contracts say that it may no longer do what it should."""


@dataclass(frozen=True)
class Rulings:
    """What was decided before a replay, by the names of the patches; each with its reason."""

    skipped: Mapping[str, str] = field(default_factory=dict)
    absorbed: Mapping[str, str] = field(default_factory=dict)
    contracts: Mapping[str, str] = field(default_factory=dict)
    messages: Mapping[str, str] = field(default_factory=dict)
    """New commit messages."""

    def on(self, name: str, verdict: Verdict) -> tuple[Ruling, str] | None:
        """Return the ruling on a patch that got ``verdict``, with its reason."""
        if name in self.skipped:
            return Ruling.SKIPPED, self.skipped[name]
        if verdict is Verdict.ABSORBED and name in self.absorbed:
            return Ruling.ABSORBED, self.absorbed[name]
        if verdict is Verdict.CONTRACT_BROKEN and name in self.contracts:
            return Ruling.CONTRACTS, self.contracts[name]
        return None


@dataclass(frozen=True)
class ReplayedPatch:
    """What became of one patch on the new release."""

    name: str
    verdict: Verdict
    outcome: Outcome
    commit: str | None
    messages: tuple[str, ...] = ()
    resolution: str | None = None
    """Id of the recorded resolution that was used for its conflict, or for its broken contracts."""
    conflicts: tuple[FileConflict, ...] = ()
    contracts: tuple[ContractFinding, ...] = ()
    conflict: str | None = None
    """Id of the conflict, or of the broken contracts, that wait for a person. A patch that only seems to be
    absorbed has one too."""
    ruling: Ruling | None = None
    reason: str | None = None
    """Why the ruling was made."""
    used: tuple[str, ...] = ()
    """Ids of all recorded resolutions that were used."""

    @property
    def needs_somebody(self) -> bool:
        """Whether a person has to look at the patch."""
        return not self.verdict.is_good and self.ruling is None


@dataclass(frozen=True)
class Replay:
    """A whole stack on another release."""

    git: Git = field(repr=False)
    old_base: str
    new_base: str
    patches: tuple[ReplayedPatch, ...]
    places: tuple[PatchPlace, ...] = field(repr=False)
    """One for each patch, in the same order."""
    attempts: tuple[Attempt, ...] = field(repr=False)
    """The same, of what the verdicts rest on."""

    @property
    def head(self) -> str:
        """The commit of the last patch that applied (the new base when none did)."""
        commits = [patch.commit for patch in self.patches if patch.commit]
        return commits[-1] if commits else self.new_base

    @property
    def troubled(self) -> tuple[ReplayedPatch, ...]:
        """The patches that somebody has to look at."""
        return tuple(patch for patch in self.patches if patch.needs_somebody)


class Judge(Protocol):
    """What a replay asks about each patch, beyond whether it applies."""

    def conflicts(self, place: PatchPlace, attempt: Attempt | None) -> tuple[FileConflict, ...]:
        """Explain the conflict of a patch; ``attempt`` is what carrying it gave, where that is known."""

    def broken(self, place: PatchPlace) -> tuple[BrokenContract, ...]:
        """Return the contracts of a patch that the new release breaks."""

    def contracts(self, place: PatchPlace, broken: tuple[BrokenContract, ...]) -> tuple[ContractFinding, ...]:
        """Explain broken contracts."""


@dataclass(frozen=True)
class Reports:
    """The judge that looks at everything; ``history`` also names upstream's commits."""

    history: History | None = None

    def conflicts(self, place: PatchPlace, attempt: Attempt | None) -> tuple[FileConflict, ...]:
        """Explain the conflict of a patch; ``attempt`` is what carrying it gave, where that is known."""
        return explain_conflict(place, self.history, attempt=attempt)

    def broken(self, place: PatchPlace) -> tuple[BrokenContract, ...]:
        """Return the contracts of a patch that the new release breaks."""
        return broken_contracts(place)

    def contracts(self, place: PatchPlace, broken: tuple[BrokenContract, ...]) -> tuple[ContractFinding, ...]:
        """Explain broken contracts."""
        return explain_contracts(place, broken, self.history)


def replay(
    git: Git,
    stack: Stack,
    old_base: str,
    new_base: str,
    *,
    history: History | None = None,
    resolutions: Resolutions | None = None,
    rulings: Rulings | None = None,
) -> Replay:
    """Carry all patches of ``stack`` from its own release to another, in a repository that has both.

    ``git`` is a workbench; the bases are commits. After a patch that does not apply the rest is tried on
    the tree without it. Conflicts that ``resolutions`` knows are resolved as recorded. ConflictError when
    the stack does not even apply to its own release.
    """
    head = new_base
    settled: list[Settled] = []
    judge = Reports(history)
    with without_collection(), _Beside.open(git, judge, explains=history is None) as beside:
        own = beside.own_commits(stack, old_base)
        own_files = OwnFiles(git, old_base, new_base, own)
        settler = Settler(resolutions, rulings or Rulings(), judge, own_files)
        for place in places_of(git, stack, own, old_base, new_base):
            missing = [one.patch for one in settled if one.done.commit is None]
            settled.append(settler.settle(replace(place, new_before=head), missing))
            beside.begin(settled[-1])
            head = settled[-1].done.commit or head
        patches = tuple(beside.explained(one) for one in settled)
    return Replay(
        git,
        old_base,
        new_base,
        patches,
        tuple(one.place for one in settled),
        tuple(one.attempt for one in settled),
    )


def own_commits(git: Git, stack: Stack, old_base: str) -> tuple[AppliedPatch, ...]:
    """Apply a stack to its own release. ConflictError when a well-formed patch does not apply strictly."""
    own = try_stack(git, old_base, stack.patches)
    _require_applied(stack, own)
    return own


def _require_applied(stack: Stack, own: Sequence[AppliedPatch]) -> None:
    if any(result.outcome not in (Outcome.STRICT, Outcome.MALFORMED) for result in own):
        raise ConflictError(
            f"the stack of {stack.target} does not apply to its own release, {stack.pin.release}",
            details=[line for result in own for line in describe(result)],
            hint="bring it in order there first: `apply --three-way`, then `refresh`",
        )


def places_of(
    git: Git, stack: Stack, own: Iterable[AppliedPatch], old_base: str, new_base: str
) -> Iterator[PatchPlace]:
    """Yield where each patch is on its own release; on the new one all are put on the bare release."""
    before = old_base
    for entry, patch, result in zip(stack.series.patches, stack.patches, own, strict=True):
        after = result.commit or before
        yield PatchPlace(git, entry, patch, old_base, new_base, before, after, new_base, None)
        before = after


@dataclass(frozen=True)
class Settled:
    """What became of a patch, and what that rests on."""

    done: ReplayedPatch
    place: PatchPlace
    attempt: Attempt
    carried: Attempt | None = None
    """The attempt before any resolution was looked for, where it is known."""
    broken: tuple[BrokenContract, ...] = ()
    """Its broken contracts, still to be explained."""

    @property
    def patch(self) -> Patch:
        """The patch itself."""
        return self.place.patch


@dataclass(frozen=True)
class _OwnCommits:
    """A stack on its own release; the first commits are in use while the others are still made."""

    stack: Stack
    made: tuple[Future[AppliedPatch], ...]

    def __iter__(self) -> Iterator[AppliedPatch]:
        """Yield what became of each patch. ConflictError as :func:`own_commits` raises it."""
        for future in self.made:
            if future.result().outcome is not Outcome.STRICT:
                _require_applied(self.stack, [one.result() for one in self.made])
            yield future.result()


class _Beside:
    """A thread for what need not be done in the middle of a replay: all of it waits for git a lot.

    That is making the stack's own commits and, where the judge ``explains`` by git alone, explaining what is
    wrong with patches; otherwise that is done after the replay.
    """

    def __init__(self, git: Git, executor: Executor, judge: Judge, *, explains: bool) -> None:
        self._git = git
        self._executor = executor
        self._judge = judge
        self._explains = explains
        self._begun: dict[str, Future[ReplayedPatch]] = {}

    @classmethod
    @contextmanager
    def open(cls, git: Git, judge: Judge, *, explains: bool) -> Iterator[Self]:
        """Start the thread, which has ``git`` opened for itself."""
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        with git.unopened.opened() as opened:
            try:
                yield cls(opened, executor, judge, explains=explains)
            finally:
                executor.shutdown(cancel_futures=True)

    def own_commits(self, stack: Stack, old_base: str) -> _OwnCommits:
        """Begin to apply a stack to its own release."""
        results = try_each(self._git, old_base, stack.patches)
        return _OwnCommits(stack, tuple(self._executor.submit(next, results) for _ in stack.patches))

    def begin(self, settled: Settled) -> None:
        """Have a patch explained, if there is anything to explain."""
        if self._explains and (settled.broken or settled.done.verdict is Verdict.CONFLICT):
            place = replace(settled.place, git=self._git)
            work = self._executor.submit(self._explain, replace(settled, place=place))
            self._begun[settled.done.name] = work

    def explained(self, settled: Settled) -> ReplayedPatch:
        """Return a patch with all explained; what went wrong with that is raised here."""
        work = self._begun.get(settled.done.name)
        return self._explain(settled) if work is None else work.result()

    def _explain(self, settled: Settled) -> ReplayedPatch:
        done, place = settled.done, settled.place
        contracts = self._judge.contracts(place, settled.broken)
        is_conflict = done.verdict is Verdict.CONFLICT
        conflicts = self._judge.conflicts(place, settled.carried) if is_conflict else ()
        return replace(done, conflicts=conflicts, contracts=contracts)


@dataclass(frozen=True)
class Settler:
    """Carries one patch and gives the verdict, with recorded resolutions and rulings.

    Conflicts and broken contracts are left to be explained: no later patch depends on that.
    """

    resolutions: Resolutions | None
    rulings: Rulings
    judge: Judge
    own_files: OwnFiles

    def settle(self, place: PatchPlace, missing: Sequence[Patch] = ()) -> Settled:
        """Carry the patch to ``place.new_before``; ``missing`` are earlier patches that are not there."""
        git, patch = place.git, place.patch
        attempt = carried = carry(
            git, patch, place.old_before, place.old_after, place.new_before, self.own_files
        )
        used: list[str] = []
        conflict = None
        if attempt.conflicts:
            conflict = conflict_id("conflict", patch.name, attempt.conflicts)
            attempt = self._resolved(place, attempt, conflict, used)
        place = self._committed(place, attempt)
        broken = self._broken(place, amended=bool(used))
        while broken and attempt.outcome.applied:
            conflict = contract_id(place)
            amended = self._resolved(place, attempt, conflict, used)
            if amended is attempt:
                break
            attempt, place = amended, self._committed(place, amended)
            broken = self._broken(place, amended=True)
        done = self._verdict(place, attempt.outcome, broken, tuple(used))
        waits = conflict if attempt.conflicts or done.verdict is Verdict.CONTRACT_BROKEN else None
        messages = (*attempt.messages, *(_depends(patch, missing) if waits else ()))
        broken = tuple(name_missing(one, missing) for one in broken)
        return Settled(replace(done, conflict=waits, messages=messages), place, attempt, carried, broken)

    def _resolved(self, place: PatchPlace, attempt: Attempt, conflict: str, used: list[str]) -> Attempt:
        """Return what a recorded resolution makes of the attempt, or the attempt itself."""
        found = self.resolutions.find(place.patch.name, conflict) if self.resolutions else None
        if found is None or conflict in used or attempt.tree is None:
            return attempt
        tree = found.apply(place.git, attempt.tree)
        if tree is None:
            message = f"the recorded resolution {conflict[:12]} does not fit and was left alone"
            return replace(attempt, messages=(*attempt.messages, message))
        used.append(conflict)
        if tree == place.git.tree(place.new_before):
            return Attempt(Outcome.ABSORBED, None)
        return Attempt(Outcome.THREE_WAY, tree, messages=_other_files(place, attempt, tree))

    def _committed(self, place: PatchPlace, attempt: Attempt) -> PatchPlace:
        if attempt.tree is None or attempt.outcome is Outcome.ABSORBED:
            return replace(place, new_after=None)
        message = self.rulings.messages.get(place.patch.name)
        commit = commit_patch(place.git, place.new_before, attempt.tree, place.patch, message=message)
        return replace(place, new_after=commit)

    def _broken(self, place: PatchPlace, *, amended: bool) -> tuple[BrokenContract, ...]:
        broken = () if place.new_after is None else self.judge.broken(place)
        return tuple(one for one in broken if not amended or still_relies(place, one.finding))

    def _verdict(
        self, place: PatchPlace, outcome: Outcome, broken: tuple[BrokenContract, ...], used: tuple[str, ...]
    ) -> ReplayedPatch:
        name = place.patch.name
        verdict = verdict_on(outcome, broken)
        ruling, reason = self.rulings.on(name, verdict) or (None, None)
        stays = outcome.applied and ruling is not Ruling.SKIPPED
        return ReplayedPatch(
            name,
            verdict,
            outcome,
            place.new_after if stays else None,
            resolution=used[0] if used else None,
            ruling=ruling,
            reason=reason,
            used=used,
        )


def _other_files(place: PatchPlace, attempt: Attempt, tree: str) -> tuple[str, ...]:
    """Name the files that a patch changes because of its resolution alone, or does not change any more."""
    words = ("diff-tree", "-r", "-z", "--name-only", "--no-renames", place.new_before)
    before, after = (
        set(place.git.run(*words, at).fields) for at in (attempt.marked or str(attempt.tree), tree)
    )
    before.update(stages.path for stages in attempt.conflicts)
    return (
        *(f"{path}: the patch changes it because of the resolution" for path in sorted(after - before)),
        *(f"{path}: the resolution leaves no change of it" for path in sorted(before - after)),
    )


def contract_id(place: PatchPlace) -> str:
    """Return the id of broken contracts: of what the patch gave, and of what it was made from."""
    paths = place.patch.paths
    commits = (place.old_before, place.new_before, place.old_after)
    base, ours, theirs = (sides(place.git, commit, paths) for commit in commits)
    stages = [Stages(path, base.get(path), ours.get(path), theirs.get(path)) for path in paths]
    given = sides(place.git, place.new_after or place.new_before, paths)
    more = [f"{path} {given[path].mode}:{given[path].blob}" for path in sorted(given)]
    return conflict_id("contract", place.patch.name, stages, *more)


def _depends(patch: Patch, missing: Sequence[Patch]) -> list[str]:
    """Name the earlier patches that are not there and touch the same files."""
    return [
        f"{', '.join(sorted(shared))}: also changed by {other.name}, which is not there"
        for other in missing
        if (shared := set(patch.paths) & set(other.paths))
    ]


def verdict_on(outcome: Outcome, broken: tuple[BrokenContract, ...]) -> Verdict:
    """Return the verdict that an outcome and broken contracts give together."""
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
