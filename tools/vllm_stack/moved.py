"""Where code went between two releases: renamed files, and lines or definitions in another place."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_stack.git import GitError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from vllm_stack.git import Git, GitResult
    from vllm_stack.linemap import Span
    from vllm_stack.objects import Entry

#: Shorter lines (a bracket, ``return x``) stand in too many files to tell where code went.
_TELLING_LENGTH = 12
#: Share of a hunk's telling lines that have to be together elsewhere.
_ENOUGH = 0.6
#: Lines looked for at once; more only cost time.
_MOST_LINES = 40
#: A place may be twice as long as what is looked for, and this many lines longer.
_SLACK = 3
_DEFINITION = re.compile(r"^(\s*)(?:async\s+)?(def|class)\s+(\w+)")
#: How git says that a disk or a quota is full, or that a file may not grow any further. The first is its own
#: word for a full disk, and what it says when a pack does not fit.
_NO_ROOM = (
    b"Out of diskspace",
    *(os.strerror(number).encode() for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
)
_GREP_LINE = re.compile(rb"^(?P<path>.*?)\0(?P<line>\d+)\0(?P<text>.*)$", re.DOTALL)


@dataclass(frozen=True)
class Rename:
    """A file of the old release that the new one has elsewhere."""

    path: str
    similarity: int
    """Per cent, as git counts it."""


@dataclass(frozen=True)
class Elsewhere:
    """A place of the new release that looks like where code went."""

    path: str
    line: int
    found: int
    """How many of the looked-for lines are there."""
    of: int
    definition: str | None = None
    """E.g. ``def name``, when the place was found by that."""


@lru_cache(maxsize=16)
def renames(git: Git, old: str, new: str) -> dict[str, Rename]:
    """Return the files that git takes for renamed between two commits, by their old path."""
    words = ("-r", "-z", "--name-status", "--find-renames=50%", "-l32767", "--diff-filter=R")
    fields = git.run("diff-tree", *words, old, new).fields
    triples = zip(fields[::3], fields[1::3], fields[2::3], strict=True)
    return {before: Rename(after, int(status[1:])) for status, before, after in triples}


@lru_cache(maxsize=16)
def changed_paths(git: Git, old: str, new: str) -> frozenset[str]:
    """Return the files of ``new`` that ``old`` does not have as they are."""
    words = ("-r", "-z", "--name-only", "--no-renames", "--diff-filter=AMT")
    return frozenset(git.run("diff-tree", *words, old, new).fields)


@dataclass(frozen=True)
class Definition:
    """A class or function of a Python file."""

    kind: str
    """``class`` or ``def``."""
    path: tuple[str, ...]
    """The names of those around it, and its own last."""

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path[-1]

    @property
    def is_special(self) -> bool:
        """Whether its name is one that Python gives a meaning."""
        return self.name.startswith("__") and self.name.endswith("__")

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(self.path)}"


def defines(line: str) -> tuple[str, str] | None:
    """Return ("def" or "class", name) of a line of Python that begins a definition."""
    match = _DEFINITION.match(line)
    return (match[2], match[3]) if match else None


def enclosing_definition(lines: Sequence[str], at: int) -> Definition | None:
    """Return the innermost class or function around line ``at`` (from 0) of a Python file, or None."""
    names: list[str] = []
    kind = ""
    within: int | None = None
    for line in reversed(lines[: at + 1]):
        text = line.strip()
        # Blank lines and comments may stand anywhere; a closing bracket ends a signature of several lines.
        if not text or text.startswith((")", "]", "}", "#")):
            continue
        indent = len(line) - len(line.lstrip())
        found = defines(line)
        if found and (within is None or indent < within):
            kind = kind or found[0]
            names.insert(0, found[1])
        within = indent if within is None else min(within, indent)
        if within == 0:
            break
    return Definition(kind, tuple(names)) if names else None


def find_code(
    git: Git,
    bases: tuple[str, str],
    wanted: Iterable[str],
    definition: Definition | None,
    suffix: str = "",
) -> Elsewhere | None:
    """Look in the files that changed between two releases for code that is not where it was.

    Only files that end in ``suffix`` are searched. ``wanted`` are its lines: the place found is the one that
    has most of them together, if it has enough. Failing that it is the only new place of ``definition``.
    """
    telling = list(dict.fromkeys(line.strip() for line in wanted if len(line.strip()) >= _TELLING_LENGTH))
    telling = telling[:_MOST_LINES]
    # Every class may have an __init__.
    phrase = f"{definition.kind} {definition.name}" if definition and not definition.is_special else None
    patterns = [*telling, *([phrase] if phrase else [])]
    if not patterns:
        return None
    hits = _grep_changed(git, bases, patterns, suffix)
    places = [_densest(path, found, telling) for path, found in hits.items()]
    best = max((place for place in places if place), key=lambda place: place.found, default=None)
    if best and best.found >= max(2, _ENOUGH * len(telling)):
        return best
    return _only_definition(git, bases[0], hits, phrase) if phrase else None


def _only_definition(
    git: Git, old: str, hits: Mapping[str, list[tuple[int, str]]], phrase: str
) -> Elsewhere | None:
    """Return the one file that has the definition and did not have it before."""
    kind, name = phrase.split()
    places = [
        Elsewhere(path, line, 1, 1, phrase)
        for path, found in hits.items()
        for line, text in found
        if defines(text) == (kind, name)
    ]
    paths = sorted({place.path for place in places})
    before = _grep(git, old, [phrase], [f":(top,literal){path}" for path in paths]) if paths else {}
    fresh = [place for place in places if place.path not in before]
    return fresh[0] if len(fresh) == 1 else None


def _grep(git: Git, commit: str, texts: list[str], where: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """Return the lines of a commit that contain any of the texts, by path: number from 1 and the line."""
    words = [word for text in texts for word in ("-e", text)]
    found = git.grep("-I", "--full-name", "--fixed-strings", *words, commit, "--", *where)
    hits: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for line in found.split(b"\n"):
        match = _GREP_LINE.match(line)
        if match:
            path = match["path"].decode("utf-8", "surrogateescape").removeprefix(f"{commit}:")
            hits[path].append((int(match["line"]), match["text"].decode("utf-8", "backslashreplace")))
    return hits


def _grep_changed(
    git: Git, bases: tuple[str, str], texts: list[str], suffix: str
) -> dict[str, list[tuple[int, str]]]:
    """Search those files of the new one of two commits that differ from the old one's and end in ``suffix``.

    They are put side by side into a tree, so that git does not look at all the others.
    """
    files = _unpacked(git, bases, suffix)
    # Their numbers, all as long, keep them in order.
    lines = (f"{entry.mode} blob {entry.id}\t{at:09}\0" for at, (_, entry) in enumerate(files))
    tree = git.run("mktree", "-z", stdin="".join(lines).encode()).text
    return {files[int(name)][0]: found for name, found in _grep(git, tree, texts, ()).items()}


@lru_cache(maxsize=16)
def _unpacked(git: Git, bases: tuple[str, str], suffix: str) -> tuple[tuple[str, Entry], ...]:
    """Return those files, which the repository has uncompressed from then on.

    They are searched for one hunk after another, and nearly all of that would be spent on inflating them.
    """
    with git.reading() as objects:
        paths = [path for path in sorted(changed_paths(git, *bases)) if path.endswith(suffix)]
        entries = [(path, objects.find(bases[1], path)) for path in paths]
    files = tuple((path, entry) for path, entry in entries if entry is not None and entry.kind == "blob")
    if files and git.git_dir is not None:
        _pack_uncompressed(git, git.git_dir / "objects" / "pack", [entry.id for _, entry in files])
    return files


def _pack_uncompressed(git: Git, folder: Path, blobs: Sequence[str]) -> None:
    """Put copies of blobs into a pack. Where there is no room for that, searching only takes longer.

    GitError when git fails for another reason.
    """
    # Copies of what is there anyway need not be safe on the disk.
    words = ("-c", "core.fsync=none", "pack-objects", "--quiet", "--window=0", "--no-reuse-object")
    wanted = "".join(f"{blob}\n" for blob in blobs).encode()
    done = git.run(*words, "--compression=0", folder / "pack", stdin=wanted, check=False)
    if done.returncode == 0:
        return
    # What git had written until then would keep the disk full; nothing else makes packs here.
    for left in folder.glob("tmp_*"):
        left.unlink(missing_ok=True)
    if not _had_no_room(done):
        raise GitError(done)


def _had_no_room(done: GitResult) -> bool:
    """Say whether a git that failed could not write for want of room."""
    return done.returncode == -signal.SIGXFSZ or any(reason in done.stderr for reason in _NO_ROOM)


def _densest(path: str, hits: list[tuple[int, str]], telling: list[str]) -> Elsewhere | None:
    """Return the stretch of a file, twice as long as what is looked for, that has most of it."""
    wanted = set(telling)
    exact = [(line, text.strip()) for line, text in hits if text.strip() in wanted]
    best: Elsewhere | None = None
    for at, (first, _) in enumerate(exact):
        inside = {text for line, text in exact[at:] if line < first + 2 * len(telling) + _SLACK}
        if best is None or len(inside) > best.found:
            best = Elsewhere(path, first, len(inside), len(telling))
    return best


def overlaps(place: Elsewhere, path: str, span: Span) -> bool:
    """Say whether a place lies inside ``span`` of the file ``path``."""
    return place.path == path and span.start <= place.line - 1 < span.stop
