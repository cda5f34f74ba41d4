"""Carrying one patch to another release: strictly first, by merging second, each seen from both sides.

Applying alone puts a hunk wherever its context stands, merging alone follows how the file moved. Where
they disagree, or where text alone cannot tell two places apart, the patch conflicts: nothing lands in a
wrong place without a person having seen it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_stack.absorbing import without_absorbed
from vllm_stack.applying import Outcome, apply_strictly, moved_hunks, structural_faults, take_apart
from vllm_stack.merging import Merge, Side, Stages, merge, sides, with_sides
from vllm_stack.patch import FileDiff, Patch
from vllm_stack.placement import Placed, Text, offsets, strays
from vllm_stack.scratchindex import scratch_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm_stack.git import Git
    from vllm_stack.ownfiles import OwnFiles


@dataclass(frozen=True)
class Attempt:
    """What carrying a patch gave."""

    outcome: Outcome
    tree: str | None
    """The result. For a conflict: all that merged, the conflicted files as the new release has them."""
    conflicts: tuple[Stages, ...] = ()
    """What did not merge; also of a patch that seems absorbed, which a person may see otherwise."""
    marked: str | None = None
    """For a conflict: the tree that a person starts from; its files may hold git's markers."""
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Carried:
    """A patch between the commits before and after it on its own release, and one of the new release."""

    git: Git
    patch: Patch
    old_before: str
    old_after: str
    new_before: str
    said: tuple[str, ...]
    """What git said when it applied the patch strictly."""

    def text(self, side: Side) -> Text:
        return Text.of(self.git.data(side.blob))

    def change(self, tree: str) -> tuple[FileDiff, ...]:
        """Return the change from the new release to ``tree``, renames off."""
        words = ("diff-tree", "-p", "--no-renames", "--unified=3", self.new_before, tree)
        return Patch("result", self.git.run(*words).stdout).files


def carry(
    git: Git, patch: Patch, old_before: str, old_after: str, new_before: str, own: OwnFiles | None = None
) -> Attempt:
    """Apply ``patch`` to the commit ``new_before`` of the new release; nothing is committed.

    ``old_before`` and ``old_after`` are the commits around it on the release that it was made for. ``own``
    are the files that its stack makes: with them the same comes out, sooner.
    """
    faults = structural_faults(patch)
    if faults:
        return Attempt(Outcome.MALFORMED, None, messages=faults)
    outcome, said, tree = _apply(git, patch, new_before)
    carried = _Carried(git, patch, old_before, old_after, new_before, said)
    before, here = (sides(git, commit, patch.paths) for commit in (old_before, new_before))
    if tree is not None and before == here and not _has_lost_folders(carried):
        return Attempt(outcome, tree)
    renames = own is None or _may_follow_renames(carried, before, here, own)
    merged = merge(git, old_before, new_before, old_after, renames=renames)
    if tree is None:
        return _merged(carried, merged)
    return _compared(carried, Attempt(outcome, tree, messages=moved_hunks(said)), merged)


def _has_lost_folders(carried: _Carried) -> bool:
    """Say whether the patch adds a file below a folder that the new release does not have any more."""
    added = (file.path for file in carried.patch.files if file.status == "A")
    folders = {path[: match.start()] for path in added for match in re.finditer("/", path)}
    return any(
        carried.git.entry(carried.old_before, folder) and not carried.git.entry(carried.new_before, folder)
        for folder in folders
    )


def _may_follow_renames(
    carried: _Carried, before: Mapping[str, Side], here: Mapping[str, Side], own: OwnFiles
) -> bool:
    """Say whether merging may have to do with renames; ``before`` and ``here`` is what it starts from."""
    gone = {side.blob for path, side in before.items() if path not in here}
    if not gone:
        return True  # no look at the files is taken then
    if any(file.status == "D" for file in carried.patch.files):
        return True  # the patch may itself have moved what it deletes
    if any("\N{REPLACEMENT CHARACTER}" in path for path in carried.patch.paths):
        return True  # a name that is not UTF-8: what stands there was not looked up
    if any(path not in before for path in here) or _has_lost_folders(carried):
        return True  # what it adds may be in the place of a renamed file, or in a renamed folder
    return not own.are_nowhere(gone, carried.old_before, carried.new_before)


def _apply(git: Git, patch: Patch, parent: str) -> tuple[Outcome, tuple[str, ...], str | None]:
    with scratch_index(git, parent) as index:
        outcome, said = apply_strictly(take_apart(patch.data).diff, index)
        tree = index.write() if outcome.applied else None
    return outcome, said, tree


def _merged(carried: _Carried, merged: Merge) -> Attempt:
    """Judge the merge of a patch that does not apply strictly."""
    if not merged.is_clean:
        return _unmerged(carried, merged)
    if merged.tree == carried.git.tree(carried.new_before):
        return Attempt(Outcome.ABSORBED, None)
    change = carried.change(merged.tree)
    astray = _astray(carried, change) or _defined_twice(carried)
    if astray:
        stages = _stages(carried, [path for path, _ in astray])
        return _conflict(carried, merged.tree, stages, [message for _, message in astray])
    messages = (*_renames(carried, change), *_partly_absorbed(carried, change))
    return Attempt(Outcome.THREE_WAY, merged.tree, messages=messages)


def _unmerged(carried: _Carried, merged: Merge) -> Attempt:
    """Judge a merge with conflicts: one whose every hunk seems to be upstream already is absorbed.

    Seems: equal lines within a larger change need not do the same. A person can say that they do not, and
    no hunk is left out of a patch that stays without a person having seen it.
    """
    rest, notes = (merged, ()) if merged.messages else without_absorbed(carried.git, merged)
    attempt = _conflict(carried, merged.tree, merged.conflicts, (*_reasons(carried, merged), *notes))
    if rest.is_clean and rest.tree == carried.git.tree(carried.new_before):
        return replace(attempt, outcome=Outcome.ABSORBED, messages=notes)
    return attempt


def _compared(carried: _Carried, applied: Attempt, merged: Merge) -> Attempt:
    """Judge a patch that applies with equal context, by what merging does with it."""
    same = merged.is_clean and merged.tree == applied.tree
    if same and merged.tree == carried.git.tree(carried.new_before):
        return Attempt(Outcome.ABSORBED, None)  # e.g. a mode, which git applies where it is already
    if merged.is_clean and not same:
        return _disagreement(carried, merged)
    if not merged.is_clean and not _is_only_text(carried, merged.conflicts):
        return _conflict(carried, merged.tree, merged.conflicts, _reasons(carried, merged))
    doubtful = _doubtful(carried, merged=same) or _defined_twice(carried)
    if not doubtful:
        return applied
    stages = merged.conflicts or _stages(carried, [path for path, _ in doubtful])
    return _conflict(carried, merged.tree, stages, [message for _, message in doubtful])


def _disagreement(carried: _Carried, merged: Merge) -> Attempt:
    if merged.tree == carried.git.tree(carried.new_before):
        message = "merging finds its change there already, applying would make it a second time"
    else:
        message = "applying it and merging it put the change in different places"
    return _conflict(carried, merged.tree, _stages(carried, carried.patch.paths), [message])


def _is_only_text(carried: _Carried, conflicts: Sequence[Stages]) -> bool:
    """Say whether only lines of files that are in all three versions conflict."""
    return all(at.is_of_lines and at.path in carried.patch.paths for at in conflicts)


def _reasons(carried: _Carried, merged: Merge) -> list[str]:
    """Say in a line for each file why it does not merge."""
    return [*(f"{at.path}: {_reason(carried, at)}" for at in merged.conflicts), *merged.messages]


def _reason(carried: _Carried, at: Stages) -> str:
    if at.ours is None and at.base is None:
        return "the patch adds a file to a folder that upstream renamed"
    if at.ours is None:
        return "the new release does not have it any more"
    if at.theirs is None:
        return "the patch deletes it, upstream changed it"
    if at.base is None:
        return "the patch adds it, and the new release has one with other content"
    return _reason_of_lines(carried, at.base, at.ours)


def _reason_of_lines(carried: _Carried, old: Side, new: Side) -> str:
    if old.mode != new.mode:
        return "upstream made another kind of file of it"
    if any(b"\0" in carried.git.data(side.blob) for side in (old, new)):
        return "it is a binary file, and both the patch and upstream changed it"
    before, after = carried.text(old).ends_in_crlf, carried.text(new).ends_in_crlf
    if before != after:
        return f"upstream changed its line endings to {'CRLF' if after else 'LF'}"
    return "upstream changed the lines that the patch changes, or their neighbours"


def _conflict(
    carried: _Carried, marked: str, conflicts: tuple[Stages, ...], messages: Iterable[str]
) -> Attempt:
    rest = _without(carried, marked, {at.path: at.ours for at in conflicts})
    return Attempt(Outcome.CONFLICT, rest, conflicts, marked, tuple(dict.fromkeys(messages)))


def _without(carried: _Carried, marked: str, ours: Mapping[str, Side | None]) -> str:
    """Return ``marked`` with the conflicted files as the new release has them, given as ``ours``."""
    here = sides(carried.git, carried.new_before, list(ours))
    if any(here.get(path) != side for path, side in ours.items()):
        return with_sides(carried.git, marked, ours)  # merging gave some another name
    # Mostly little else has merged, so that the new release itself is nearer to it.
    with carried.git.reading() as objects:
        merged = [item for item in objects.changes(carried.new_before, marked) if item[0] not in ours]
    wanted = {path: Side(entry.mode, entry.id) if entry else None for path, entry in merged}
    return with_sides(carried.git, carried.new_before, wanted)


def _stages(carried: _Carried, paths: Sequence[str]) -> tuple[Stages, ...]:
    """Return the three versions of files that git did merge, but that a person has to look at."""
    commits = (carried.old_before, carried.new_before, carried.old_after)
    base, ours, theirs = (sides(carried.git, commit, paths) for commit in commits)
    return tuple(Stages(path, base.get(path), ours.get(path), theirs.get(path)) for path in paths)


def _doubtful(carried: _Carried, *, merged: bool) -> list[tuple[str, str]]:
    """Return the files with a hunk that could belong elsewhere in them, each with what to say about it."""
    moved = offsets(carried.said, carried.patch.files)
    old = sides(carried.git, carried.old_before, carried.patch.paths)
    new = sides(carried.git, carried.new_before, carried.patch.paths)
    found = []
    for file in carried.patch.files:
        before, after = old.get(file.path), new.get(file.path)
        if before is None or after is None or before == after:
            continue
        texts = carried.text(before), carried.text(after)
        for number, hunk in enumerate(file.hunks, start=1):
            at = hunk.old_start + moved.get((file.path, number), 0)
            if not Placed(hunk, *texts, at).is_certain(merged=merged):
                message = (
                    f"{file.path}:{at}: hunk {number} fits here, but its place cannot be told for certain"
                )
                found.append((file.path, message))
    return found


def _astray(carried: _Carried, change: Sequence[FileDiff]) -> list[tuple[str, str]]:
    """Return the files where merging put a change into another function than it was made in."""
    original = {file.path: file for file in carried.patch.files}
    old = sides(carried.git, carried.old_before, carried.patch.paths)
    new = sides(carried.git, carried.new_before, [file.path for file in change])
    found = []
    for file in change:
        before, after = old.get(file.path), new.get(file.path)
        if file.path not in original or before is None or after is None:
            continue
        into = strays((carried.text(before), original[file.path]), (carried.text(after), file))
        for scope in sorted(into):
            where = ".".join(scope) or "the module's own level"
            found.append(
                (file.path, f"{file.path}: merging puts a change into {where}, it was not made there")
            )
    return found


def _defined_twice(carried: _Carried) -> list[tuple[str, str]]:
    """Return the files to which the patch adds a class or function that upstream has by now itself."""
    commits = (carried.old_before, carried.old_after, carried.new_before)
    versions = [sides(carried.git, commit, carried.patch.paths) for commit in commits]
    found = []
    for path in carried.patch.paths:
        before, after, here = (version.get(path) for version in versions)
        if before is None or after is None or here is None or before == here:
            continue
        old, made, new = (carried.text(side).scopes() for side in (before, after, here))
        for scope in sorted(scope for scope in made if scope not in old and scope in new):
            message = f"the patch adds {'.'.join(scope)}, and the new release has one"
            found.append((path, f"{path}: {message}"))
    return found


def _renames(carried: _Carried, change: Sequence[FileDiff]) -> list[str]:
    """Name the files that merging followed to another path."""
    known = set(carried.patch.paths)
    return [
        f"{file.path}: upstream's new name of a file that the patch changes"
        for file in change
        if file.path not in known
    ]


def _partly_absorbed(carried: _Carried, change: Sequence[FileDiff]) -> list[str]:
    """Say which files get fewer changed lines than the patch has: the rest is upstream already."""
    left = {file.path: _changed(file) for file in change}
    found = []
    for file in carried.patch.files:
        wanted = _changed(file)
        absorbed = wanted - left.get(file.path, Counter()) if file.path in left else Counter()
        if absorbed:
            found.append(
                f"{file.path}: {absorbed.total()} of {wanted.total()} changed lines are upstream already"
            )
    return found


def _changed(file: FileDiff) -> Counter[bytes]:
    return Counter(line for hunk in file.hunks for line in hunk.lines if line[:1] in (b"+", b"-"))
