"""What upstream did to a definition between two releases, and where a definition went."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.contracts.observation import Site
from vllm_stack.git import GitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_stack.git import Git

#: Lines of a change that are shown at most.
MAXIMUM_LINES = 60
#: Unchanged lines that are shown around a change.
_CONTEXT = 3
#: How a class, a function or a variable begins at the level of a module, for git and for Python.
_DEFINITION = r"^(class|def|async def) |^[A-Za-z_][A-Za-z_0-9]*( *:[^=]*)? *=[^=]"
_NAME = re.compile(r"(?:class |def |async def )?(\w+)")
#: Release and package to the places of its definitions. Commits never change.
_PLACES: dict[tuple[str, str], dict[str, list[str]]] = {}
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


@dataclass(frozen=True)
class _Line:
    """A line of a diff; ``old`` and ``new`` are its numbers, or those of the line that would follow."""

    text: str
    old: int
    new: int


@dataclass(frozen=True)
class Releases:
    """The files of the two bare releases."""

    git: Git
    new_commit: str
    old: Mapping[str, str]
    new: Mapping[str, str]

    def on_old(self, site: Site, blob: str | None) -> Site | None:
        """Take a place from a patched tree, where its file is ``blob``, to the bare old release.

        None when the file is not upstream's, or the lines are not.
        """
        return self._on_base(self.old, site, blob)

    def on_new(self, site: Site, blob: str | None) -> Site | None:
        """Do the same with a place in a patched new release."""
        return self._on_base(self.new, site, blob)

    def _on_base(self, release: Mapping[str, str], site: Site, blob: str | None) -> Site | None:
        base = release.get(site.path)
        if base is None or blob is None:
            return None
        if base == blob:
            return site
        lines = [line for line in self._diff(base, blob, 10**6) if site.line <= line.new <= site.end_line]
        kept = [line.old for line in lines if not line.text.startswith("+")]
        return Site(site.path, min(kept), max(kept)) if kept else None

    def change(self, site: Site, *, new: bool = False) -> tuple[str, ...]:
        """Return upstream's change to the lines of ``site`` (``new``: of the new release) as unified diff."""
        path = site.path
        before, after = self.old.get(path), self.new.get(path)
        if before is None or before == after:
            return ()
        if after is None:
            text = self.git.data(before).decode("utf-8", "replace").splitlines()
            removed = [f"-{line}" for line in text[site.line - 1 : site.end_line]]
            head = [f"--- a/{path}", "+++ /dev/null", f"@@ -{site.line},{len(removed)} +0,0 @@"]
            return _shortened([*head, *removed])
        lines = self._diff(before, after, _CONTEXT)
        chosen = [line for line in lines if site.line <= (line.new if new else line.old) <= site.end_line]
        if not any(line.text[:1] in "+-" for line in chosen):
            return ()
        return _shortened([f"--- a/{path}", f"+++ b/{path}", *_with_headers(chosen)])

    def _diff(self, before: str, after: str, context: int) -> list[_Line]:
        words = (
            "diff",
            "--no-color",
            "--no-ext-diff",
            "--no-textconv",
            f"--unified={context}",
            before,
            after,
        )
        said = self.git.run(*words).stdout.decode("utf-8", "replace")
        return list(_numbered(said.splitlines()))

    def places(self, name: str, top: str) -> list[str]:
        """Return where the new release defines a class, function or variable, such as ``vllm/x.py:12``.

        ``top`` is the top-level package to search.
        """
        key = (self.new_commit, top)
        if key not in _PLACES:
            _PLACES[key] = self._index(top)
        return _PLACES[key].get(name, [])

    def _index(self, top: str) -> dict[str, list[str]]:
        """Find all module-level definitions of a package with one search."""
        found: dict[str, list[str]] = {}
        for line in self._searched(f"{top}/*.py").decode("utf-8", "replace").split("\n"):
            path, _, rest = line.partition(":")[2].partition("\0")
            number, _, text = rest.partition("\0")
            match = _NAME.match(text)
            if match:
                found.setdefault(match[1], []).append(f"{path}:{number}")
        return found

    def _searched(self, paths: str) -> bytes:
        """Return the lines of the new release that begin a definition, as ``git grep`` prints them."""
        where = ("-e", _DEFINITION, self.new_commit, "--", paths)
        # Perl's expressions take a fifth of the time, and not every git has them.
        try:
            return self.git.grep("-P", *where)
        except GitError:
            return self.git.grep("-E", *where)


def _numbered(diff: list[str]) -> Iterator[_Line]:
    """Number the lines of a diff; what replaces a line gets the old number of that line."""
    old = new = 0
    inside = replacing = False
    for text in diff:
        header = _HUNK.match(text)
        if header:
            old, new, inside = int(header[1]), int(header[2]), True
        elif inside and not text.startswith("\\"):
            kind = text[:1]
            replacing = kind == "-" or (kind == "+" and replacing)
            yield _Line(text, old - 1 if kind == "+" and replacing else old, new)
            old += kind != "+"
            new += kind != "-"


def _with_headers(lines: list[_Line]) -> Iterator[str]:
    """Put a hunk header wherever lines are left out."""
    following: int | None = None
    for line in lines:
        if following is None or line.old not in (following, following - 1):
            yield f"@@ -{line.old} +{line.new} @@"
        yield line.text
        following = line.old + 1


def _shortened(lines: list[str]) -> tuple[str, ...]:
    if len(lines) <= MAXIMUM_LINES:
        return tuple(lines)
    left = len(lines) - MAXIMUM_LINES
    return (*lines[:MAXIMUM_LINES], f"... {left} more lines")
