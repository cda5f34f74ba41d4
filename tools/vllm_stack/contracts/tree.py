"""Python modules of a commit, read from git only as far as something asks for them.

Summaries are kept for the life of the process by blob: two commits that share a file share its summary.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

from vllm_stack.contracts.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_stack.contracts.symbols import Module
    from vllm_stack.git import Git

#: Blob, module and path to what the module defines.
_SUMMARIES: dict[tuple[str, str, str], Module | None] = {}
#: Commit to the blobs of its files. Commits never change.
_LISTINGS: dict[str, Mapping[str, str]] = {}
_MODULE_FILE = ".py"


def list_blobs(git: Git, commit: str, like: str | None = None) -> Mapping[str, str]:
    """Return path to blob id for all files of ``commit``; ``like`` is a similar commit, to be compared with.

    The stack's commits differ from their base in a few files, so that only those are read again.
    """
    found = _LISTINGS.get(commit)
    if found is None:
        found = _list_all(git, commit) if like is None else _list_changed(git, commit, like)
        _LISTINGS[commit] = found
    return found


def _list_all(git: Git, commit: str) -> Mapping[str, str]:
    blobs = {}
    for field in git.run("ls-tree", "-r", "-z", commit).fields:
        meta, _, path = field.partition("\t")
        blobs[path] = meta.split(" ")[2]
    return blobs


def _list_changed(git: Git, commit: str, like: str) -> Mapping[str, str]:
    blobs = dict(list_blobs(git, like))
    with git.reading() as objects:
        for path, entry in objects.changes(like, commit):
            if entry is None:
                del blobs[path]
            else:
                blobs[path] = entry.id
    return blobs


class SourceTree:
    """The files of a commit, with some of them replaced or added (``overlay``: path to blob id)."""

    def __init__(
        self,
        blobs: Mapping[str, str],
        read: Callable[[str], bytes],
        overlay: Mapping[str, str] | None = None,
    ) -> None:
        self.blobs = {**blobs, **overlay} if overlay else blobs
        self._read = read
        self._modules: dict[str, Module | None] = {}

    def blob(self, path: str) -> str | None:
        """Return the blob id of a file, or None where the tree has no such file."""
        return self.blobs.get(path)

    def text(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None where the tree has no such file."""
        blob = self.blob(path)
        return None if blob is None else self._read(blob)

    def path_of(self, module: str) -> str | None:
        """Return the file of a module or package; None when there is none."""
        stem = module.replace(".", "/")
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if self.blob(path) is not None:
                return path
        return None

    def exists(self, module: str) -> bool:
        """Say whether a module is there, be it a folder of modules without a file of its own."""
        return self.path_of(module) is not None or self._is_folder(module.replace(".", "/"))

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.blobs)

    def _is_folder(self, folder: str) -> bool:
        prefix = f"{folder}/"
        first = bisect_left(self._sorted, prefix)
        following = (self._sorted[at] for at in range(first, len(self._sorted)))
        inside = takewhile(lambda path: path.startswith(prefix), following)
        return any(path.endswith(_MODULE_FILE) for path in inside)

    def holds(self, module: str) -> bool:
        """Say whether the top-level package of ``module`` is part of this tree."""
        return bool(module) and self.exists(module.partition(".")[0])

    def module(self, name: str) -> Module | None:
        """Return what a module defines; None when there is no such file, or it is not valid Python."""
        if name not in self._modules:
            path = self.path_of(name)
            self._modules[name] = None if path is None else self._summary(name, path)
        return self._modules[name]

    def _summary(self, name: str, path: str) -> Module | None:
        key = (self.blobs[path], name, path)
        if key not in _SUMMARIES:
            _SUMMARIES[key] = summarize(self._read(key[0]), name, path)
        return _SUMMARIES[key]


def module_name(path: str) -> str | None:
    """Return the dotted name of a Python file, or None for any other file."""
    if not path.endswith(_MODULE_FILE):
        return None
    stem = path.removesuffix(_MODULE_FILE).removesuffix("/__init__")
    return stem.replace("/", ".")
