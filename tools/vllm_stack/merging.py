"""Three-way merging of trees without a working tree: what a cherry-pick gives, renames followed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm_stack.git import GitError
from vllm_stack.objects import Entry
from vllm_stack.scratchindex import scratch_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_stack.git import Git

#: What the stages of a path say already.
_PLAIN = ("CONFLICT (content)", "CONFLICT (modify/delete)", "CONFLICT (add/add)")


@dataclass(frozen=True)
class Side:
    """A path in one of the three versions that are merged."""

    mode: str
    blob: str


@dataclass(frozen=True)
class Stages:
    """A path that could not be merged, in the three versions; None where it is not there."""

    path: str
    base: Side | None = None
    """Old release, before the patch."""
    ours: Side | None = None
    """New release, before the patch."""
    theirs: Side | None = None
    """Old release, with the patch."""

    @property
    def is_of_lines(self) -> bool:
        """Whether the file is in all three versions, so that only lines of it conflict."""
        return bool(self.base and self.ours and self.theirs)


@dataclass(frozen=True)
class Merge:
    """What merging gave. In ``tree`` the conflicted files hold git's markers."""

    tree: str
    conflicts: tuple[Stages, ...] = ()
    messages: tuple[str, ...] = field(default=())
    """What git says of conflicts that are about more than the content of a file."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left for a person."""
        return not self.conflicts


def merge(git: Git, base: str, ours: str, theirs: str, *, renames: bool = True) -> Merge:
    """Carry the change from the commit ``base`` to ``theirs`` over to ``ours``; nothing is committed.

    Without ``renames`` git looks only for renamed files of which nothing else changed, or little.
    """
    # merge-tree finds the base itself, so that both sides get a history that has just this one.
    both = [_child(git, base, side) for side in (ours, theirs)]
    # git's `merge.renames` says nothing to merge-tree before git 2.50.
    setting = () if renames else ("-c", "merge.renameLimit=1")
    done = git.run(*setting, "merge-tree", "--write-tree", "--messages", "-z", *both, check=False)
    if done.returncode not in (0, 1):
        raise GitError(done)
    # git's messages name the commits by their ids, which mean nothing to anybody.
    named = done.stdout
    for commit, name in zip(both, (b"the new release", b"the patch"), strict=True):
        named = named.replace(commit.encode(), name)
    return _renamed(git, _parse(done.stdout), _parse(named))


def _renamed(git: Git, raw: Merge, named: Merge) -> Merge:
    """Return ``named`` with the files that git calls after a commit under their new names in the tree too."""
    pairs = ((before.path, after.path) for before, after in zip(raw.conflicts, named.conflicts, strict=True))
    moved = {before: after for before, after in pairs if before != after}
    if not moved:
        return named
    there = sides(git, raw.tree, list(moved))
    wanted: dict[str, Side | None] = dict.fromkeys(moved)
    wanted.update({moved[path]: side for path, side in there.items()})
    return replace(named, tree=with_sides(git, raw.tree, wanted))


def sides(git: Git, commit: str, paths: Sequence[str]) -> dict[str, Side]:
    """Return what stands at ``paths`` in a commit or tree; absent ones are left out."""
    if not paths:
        return {}
    with git.reading() as objects:
        found = {path: objects.find(commit, path) for path in sorted(paths)}
    return {
        path: Side(entry.mode, entry.id)
        for path, entry in found.items()
        if entry is not None and entry.kind != "tree"
    }


def with_sides(git: Git, tree: str, wanted: Mapping[str, Side | None]) -> str:
    """Return ``tree`` with the given paths set, or removed where there is None, as a tree."""
    if not wanted:
        return git.tree(tree)
    with scratch_index(git, tree) as index:
        index.put({path: Entry(side.mode, side.blob) if side else None for path, side in wanted.items()})
        return index.write()


def _child(git: Git, parent: str, commit: str) -> str:
    """Return a commit of what is in ``commit`` whose only parent is ``parent``: that one, or a new one."""
    with git.reading() as objects:
        if objects.parents(commit) == (parent,):
            return commit
        return git.run("commit-tree", objects.tree(commit), "-p", parent, "-m", "side").text


def _parse(output: bytes) -> Merge:
    """Read the ``-z`` form: the tree, the stages of conflicted paths, an empty field, the messages."""
    parts = [part.decode("utf-8", "surrogateescape") for part in output.split(b"\0")]
    end = parts.index("", 1) if "" in parts[1:] else len(parts)
    stages: dict[str, dict[int, Side]] = {}
    for entry in parts[1:end]:
        head, _, path = entry.partition("\t")
        mode, blob, stage = head.split()
        stages.setdefault(path, {})[int(stage)] = Side(mode, blob)
    conflicts = tuple(
        Stages(path, sides.get(1), sides.get(2), sides.get(3)) for path, sides in stages.items()
    )
    return Merge(parts[0], conflicts, _messages(parts[end + 1 :]))


def _messages(parts: list[str]) -> tuple[str, ...]:
    """Each message comes as the number of its paths, the paths, its kind, and its text."""
    found = []
    at = 0
    while at < len(parts) and parts[at].isdigit():
        at += int(parts[at]) + 2
        text = parts[at].strip()
        if text.startswith("CONFLICT ") and not text.startswith(_PLAIN):
            found.append(text)
        at += 1
    return tuple(found)
