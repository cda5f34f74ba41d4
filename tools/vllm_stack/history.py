"""Upstream's commits between two releases: which of them touched given lines of a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_stack.errors import NetworkError
from vllm_stack.git import Git, GitError
from vllm_stack.linemap import Span, map_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_FORMAT = "--format=%x01%H%x00%cs%x00%s"
_PULL_REQUEST = re.compile(r"\(#(\d+)\)")


@dataclass(frozen=True)
class UpstreamCommit:
    """A commit of upstream's."""

    id: str
    subject: str
    pull_request: int | None
    """As the last ``(#1234)`` of the subject says."""
    date: str
    """Of the commit, as YYYY-MM-DD in UTC."""

    @classmethod
    def of(cls, commit: str, date: str, subject: str) -> UpstreamCommit:
        """Return the commit with what its subject says."""
        numbers = _PULL_REQUEST.findall(subject)
        return cls(commit, subject, int(numbers[-1]) if numbers else None, date)


@dataclass(frozen=True)
class _Rename:
    """The commit that took a path away, and what it renamed it to (None: it deleted it)."""

    commit: str
    successor: str | None


@dataclass(frozen=True)
class _Followed:
    """A path of the old release on its way to the new one."""

    end: str
    """The last revision that has it under some name."""
    name: str
    """Its name there."""
    renames: tuple[UpstreamCommit, ...]
    """The commits that renamed it, and the one that deleted it."""


@dataclass(frozen=True)
class History:
    """The commits that are in ``new`` and not in ``old``, in a clone of upstream's repository."""

    git: Git
    old: str
    new: str
    environment: Mapping[str, str]
    """What git may reach when it needs the content of a file."""

    def touching(self, path: str, old_lines: range) -> tuple[UpstreamCommit, ...]:
        """Return the commits that touched these lines, oldest first.

        ``path`` and ``old_lines`` (numbers from 1; the end is not included; an empty range is the place
        before its start) are those of the old release. A file that was renamed is followed; where it was
        deleted, the last commit is the one that did it; one that the old release does not have was touched
        by all commits that have it. NetworkError when contents cannot be fetched.
        """
        try:
            found = {commit.id: commit for commit in self._touching(path, old_lines)}
        except GitError as error:
            raise NetworkError(
                f"cannot read the history of {path} between the releases",
                details=error.details,
                hint="contents are fetched when they are needed: run it once without --offline",
            ) from error
        return tuple(found[commit] for commit in self._order if commit in found)

    @cached_property
    def _order(self) -> list[str]:
        """All commits between the releases, oldest first."""
        return self.git.run("rev-list", "--topo-order", "--reverse", self.new, f"^{self.old}").lines

    def _touching(self, path: str, old_lines: range) -> Iterator[UpstreamCommit]:
        if not self._has(self.old, path):
            yield from self._log("--no-renames", self.new, f"^{self.old}", "--", f":(literal){path}")
            return
        followed = self._followed(path)
        yield from followed.renames
        end, name = followed.end, followed.name
        lines = self._lines_at(f"{self.old}:{path}", f"{end}:{name}", old_lines)
        if lines:
            # -L follows renames only where the configuration, which is ours, does.
            words = ("-M", "--no-patch", f"-L{lines.start},{lines.stop - 1}:{name}", end, f"^{self.old}")
            yield from self._log(*words)

    @cached_property
    def _known(self) -> dict[str, _Followed]:
        return {}

    def _followed(self, path: str) -> _Followed:
        """Return where a path of the old release ends, and fetch what it held on the way, once."""
        if path not in self._known:
            renames = tuple(self._renames(path))
            end, name = self.new, path
            for rename in renames:
                name = rename.successor or name
                end = end if rename.successor else f"{rename.commit}^"
            self._prefetch(end, [path, *(rename.successor for rename in renames if rename.successor)])
            commits = [commit for rename in renames for commit in self._log("--no-walk", rename.commit)]
            self._known[path] = _Followed(end, name, tuple(commits))
        return self._known[path]

    def _log(self, *words: str) -> Iterator[UpstreamCommit]:
        settings = ("-c", "diff.renames=true", "-c", "log.follow=false")
        said = self._run(*settings, "log", "--no-color", "--no-decorate", _FORMAT, *words)
        for entry in said.split(b"\x01")[1:]:
            commit, date, subject = entry.decode("utf-8", "replace").rstrip("\n").split("\0")[:3]
            yield UpstreamCommit.of(commit, date, subject)

    def _run(self, *words: str) -> bytes:
        return self.git.run(*words, env=self.environment).stdout

    # -- renames

    def _renames(self, path: str) -> Iterator[_Rename]:
        """Yield what became of a file that the new release does not have, step by step."""
        start = self.old
        while not self._has(self.new, path):
            words = ("log", "-1", "--format=%H", "--no-renames", "--diff-filter=D", self.new, f"^{start}")
            deletion = self._run(*words, "--", f":(literal){path}").decode().strip()
            if not deletion:
                return  # never there on the way to the new release
            successor = self._successor(deletion, path)
            yield _Rename(deletion, successor)
            if successor is None:
                return
            start, path = deletion, successor

    def _has(self, commit: str, path: str) -> bool:
        return bool(self._run("ls-tree", "-z", "--name-only", commit, "--", f":(literal){path}"))

    def _successor(self, commit: str, path: str) -> str | None:
        """Return what ``commit`` renamed ``path`` to; None when it deleted it."""
        words = ("diff-tree", "-r", "-z", "-M", "--diff-filter=R", "--name-status", f"{commit}^", commit)
        fields = [part.decode("utf-8", "surrogateescape") for part in self._run(*words).split(b"\0")]
        triples = zip(fields[0::3], fields[1::3], fields[2::3], strict=False)
        return next((new for _, old, new in triples if old == path), None)

    # -- contents

    def _prefetch(self, end: str, paths: Iterable[str]) -> None:
        """Fetch at once what following the paths will need; git would ask for one content at a time."""
        named = [f":(literal){path}" for path in paths]
        log = self._run("log", "--format=%H %P", "--no-renames", end, f"^{self.old}", "--", *named)
        commits = {self.old, *log.decode().split()}
        request = "".join(f"{commit}\n" for commit in sorted(commits)) + "--\n"
        words = ("rev-list", "--no-walk", "--objects", "--missing=print", "--stdin", "--", *named)
        listed = self.git.run(*words, stdin=request.encode(), env=self.environment).lines
        missing = "".join(f"{line[1:]}\n" for line in listed if line.startswith("?"))
        if missing:
            self.git.run(
                *("-c", "fetch.negotiationAlgorithm=noop", "-c", "protocol.version=2", "fetch", "--quiet"),
                *("--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--recurse-submodules=no"),
                *("--filter=blob:none", "--stdin", "origin"),
                stdin=missing.encode(),
                env=self.environment,
            )

    def _lines_at(self, old: str, new: str, lines: range) -> range:
        """Return where ``lines`` of the blob ``old`` are in the blob ``new``; empty for an empty file.

        Lines that are not there any more stand for the two around their place.
        """
        lengths = self._length(old), self._length(new)
        start = lines.start - 1
        place = map_lines(self.git, old, new, lengths).image(Span(start, max(lines.stop - 1, start)))
        first, last = (place.start, place.stop) if len(place) else (place.start - 1, place.start + 1)
        last = min(last, lengths[1])
        return range(max(min(first, last - 1), 0) + 1, last + 1)

    def _length(self, blob: str) -> int:
        content = self._run("cat-file", "blob", blob)
        return content.count(b"\n") + (bool(content) and not content.endswith(b"\n"))
