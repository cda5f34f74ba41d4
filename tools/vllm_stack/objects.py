"""Objects of a repository, read through one git process for as long as they are asked for.

Every object is named by its id, so that no path, whatever bytes are in its name, goes through git's own
syntax for names. What was read of trees is kept: commits of one stack share nearly all of theirs.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.errors import StackError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping

_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TREE_MODE = "040000"
_SUBMODULE_MODE = "160000"


class ObjectError(StackError):
    """An object is not there, or not of the kind that it must be; or git ended before it gave it."""

    kind = "git"


@dataclass(frozen=True)
class GitObject:
    """One object of a repository."""

    id: str
    kind: str
    """``blob``, ``tree``, ``commit`` or ``tag``."""
    data: bytes


@dataclass(frozen=True)
class Entry:
    """What a tree has under a name."""

    mode: str
    """git's six digits, e.g. 100644."""
    id: str

    @property
    def kind(self) -> str:
        """``blob``, ``tree``, or ``commit`` for a submodule."""
        return {_TREE_MODE: "tree", _SUBMODULE_MODE: "commit"}.get(self.mode, "blob")


class ObjectReader:
    """One ``git cat-file --batch``: started at the first question, ended by :meth:`close`.

    It ends by itself when this process is killed, because its input ends then. Not for several threads.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def read(self, name: str) -> GitObject | None:
        """Return the object that git knows by ``name``; None when there is none.

        Raises ObjectError when git ends before it has answered; the next question starts another one.
        """
        if "\n" in name:
            raise ObjectError(f"{name!r} cannot name an object: it holds a line feed")
        if self._closed:
            raise ValueError(f"{name} was asked for after the repository was closed")
        if self._process is None:
            self._process = self._start()
        try:
            return _asked(self._process, name)
        except BaseException:
            # Of an answer that was not read to its end the rest would be taken for the next one.
            self._end()
            raise

    def close(self) -> None:
        """End the process, whatever it does. No question is answered any more."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # it only reads: nothing of what it does is worth waiting for
        with suppress(BrokenPipeError), process:
            pass  # closing sends what an interrupted question left to be sent


def _asked(process: subprocess.Popen[bytes], name: str) -> GitObject | None:
    assert process.stdin is not None  # noqa: S101 - opened as pipes
    assert process.stdout is not None  # noqa: S101
    try:
        process.stdin.write(name.encode("utf-8", "surrogateescape") + b"\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise _ended(process, name) from error
    header = process.stdout.readline()
    if not header.endswith(b"\n"):
        raise _ended(process, name)
    if header.endswith((b" missing\n", b" ambiguous\n")):
        return None
    identity, kind, size = header.split()
    data = process.stdout.read(int(size) + 1)
    if len(data) != int(size) + 1:
        raise _ended(process, name)
    return GitObject(identity.decode(), kind.decode(), data[:-1])


def _ended(process: subprocess.Popen[bytes], name: str) -> ObjectError:
    return ObjectError(f"git ended (status {process.wait()}) before it gave {name}")


class Objects:
    """The commits, trees and blobs of one repository."""

    def __init__(self, reader: ObjectReader) -> None:
        self._reader = reader
        self._trees: dict[str, str] = {}
        self._entries: dict[str, Mapping[str, Entry]] = {}

    def close(self) -> None:
        """End the process that reads."""
        self._reader.close()

    def blob(self, blob: str) -> bytes:
        """Return the bytes of a blob. ObjectError when the repository has none of that id."""
        return self._of_kind(blob, "blob").data

    def file(self, revision: str, path: str) -> bytes:
        """Return the bytes of the file that a revision has at ``path``. ObjectError when it has none."""
        entry = self.find(revision, path)
        if entry is None or entry.kind != "blob":
            what = "there is nothing" if entry is None else f"there is a {entry.kind}"
            raise ObjectError(f"{revision} has no file {path}: {what}")
        return self.blob(entry.id)

    def tree(self, revision: str) -> str:
        """Return the id of the tree of a commit (or of a tree). ObjectError when there is none."""
        found = self._trees.get(revision)
        if found is None:
            found = self._of_kind(f"{revision}^{{tree}}", "tree").id
            if _ID.fullmatch(revision):  # any other name may mean something else by and by
                self._trees[revision] = found
        return found

    def parents(self, commit: str) -> tuple[str, ...] | None:
        """Return the parents of a commit; None for what is no commit."""
        found = self._reader.read(commit)
        if found is None or found.kind != "commit":
            return None
        head = found.data.partition(b"\n\n")[0].split(b"\n")
        return tuple(line[7:].decode() for line in head if line.startswith(b"parent "))

    def find(self, revision: str, path: str) -> Entry | None:
        """Return what the tree of a revision has at ``path``; None when that is nothing."""
        *folders, name = path.split("/")
        tree = self.tree(revision)
        for folder in folders:
            entry = self.entries(tree).get(folder)
            if entry is None or entry.kind != "tree":
                return None
            tree = entry.id
        return self.entries(tree).get(name)

    def entries(self, tree: str) -> Mapping[str, Entry]:
        """Return what is directly in a tree, by name; names that are not UTF-8 have lone surrogates."""
        if tree not in self._entries:
            data = self._of_kind(tree, "tree").data
            self._entries[tree] = dict(_parsed(data, len(tree) // 2))
        return self._entries[tree]

    def changes(self, old: str, new: str) -> Iterator[tuple[str, Entry | None]]:
        """Yield the paths of files that differ between two revisions, with what the new one has there."""
        yield from self._changes("", self.tree(old), self.tree(new))

    def _changes(self, folder: str, old: str | None, new: str | None) -> Iterator[tuple[str, Entry | None]]:
        before = {} if old is None else self.entries(old)
        after = {} if new is None else self.entries(new)
        for name in sorted({*before, *after}):
            one, other = before.get(name), after.get(name)
            if one == other:
                continue
            trees = [
                entry.id if entry is not None and entry.kind == "tree" else None for entry in (one, other)
            ]
            if any(trees):
                yield from self._changes(f"{folder}{name}/", *trees)
            # A folder that took the place of a file has been told file by file; the file itself is gone.
            file = None if other is None or other.kind == "tree" else other
            if file is not None or (one is not None and one.kind != "tree"):
                yield f"{folder}{name}", file

    def _of_kind(self, name: str, kind: str) -> GitObject:
        found = self._reader.read(name)
        if found is None or found.kind != kind:
            what = "is not there" if found is None else f"is a {found.kind}"
            raise ObjectError(f"{name} {what}, and must be a {kind} of the repository")
        return found


def _parsed(data: bytes, width: int) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of a tree object; ids take ``width`` bytes."""
    at = 0
    while at < len(data):
        space = data.index(b" ", at)
        end = data.index(b"\0", space)
        entry = Entry(data[at:space].decode().rjust(6, "0"), data[end + 1 : end + 1 + width].hex())
        yield data[space + 1 : end].decode("utf-8", "surrogateescape"), entry
        at = end + 1 + width
