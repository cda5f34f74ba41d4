"""Three-way merging of trees without a working tree: what a cherry-pick gives, renames followed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm_stack.applying import scratch_index
from vllm_stack.git import GitError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_stack.git import Git

#: What the stages of a path say already.
_PLAIN = ("CONFLICT (content)", "CONFLICT (modify/delete)", "CONFLICT (add/add)")
#: git's word for "nothing there" in a list of blobs.
ABSENT = "0" * 40


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


def merge(git: Git, base: str, ours: str, theirs: str) -> Merge:
    """Carry the change from ``base`` to ``theirs`` over to ``ours`` (commits); nothing is committed."""
    # merge-tree finds the base itself, so that the three trees get a history that has just this one.
    root = _bare_commit(git, base)
    both = [_bare_commit(git, side, "-p", root) for side in (ours, theirs)]
    done = git.run("merge-tree", "--write-tree", "--messages", "-z", *both, check=False)
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
    found = {}
    for entry in git.run("ls-tree", "-z", "--full-tree", commit, "--", *paths).fields:
        head, _, path = entry.partition("\t")
        mode, kind, blob = head.split()
        if kind != "tree":
            found[path] = Side(mode, blob)
    return found


def with_sides(git: Git, tree: str, wanted: Mapping[str, Side | None]) -> str:
    """Return ``tree`` with the given paths set, or removed where there is None, as a tree."""
    with scratch_index(git, tree) as index:
        lines = (
            f"{side.mode if side else '0'} {side.blob if side else ABSENT}\t{path}"
            for path, side in wanted.items()
        )
        data = "\0".join(lines).encode("utf-8", "surrogateescape")
        git.run("update-index", "-z", "--index-info", stdin=data, env=index)
        return git.run("write-tree", env=index).text


def _bare_commit(git: Git, commit: str, *parents: str) -> str:
    return git.run("commit-tree", git.tree(commit), *parents, "-m", "side").text


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
