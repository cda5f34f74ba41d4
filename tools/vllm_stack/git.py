"""The one way in which this project runs git: explicit repository, no configuration but ours."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.errors import StackError, UsageError
from vllm_stack.objects import ObjectReader, Objects
from vllm_stack.scratchindex import ScratchIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm_stack.objects import Entry

#: Passed with ``-c``, so that they win over a repository's own configuration as well.
SETTINGS: dict[str, str] = {
    # Content must reach the object store and come back byte for byte.
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.safecrlf": "false",
    "core.fileMode": "true",
    "core.symlinks": "true",
    # A repository that sets it wins over GIT_NO_REPLACE_OBJECTS.
    "core.useReplaceRefs": "false",
    "core.precomposeUnicode": "false",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    # Nobody else's programs run.
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.pager": "cat",
    "core.editor": "false",
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    "gc.auto": "0",
    # More threads only wait for each other, since what is searched comes out of the object store.
    "grep.threads": "1",
    "maintenance.auto": "false",
    "rerere.enabled": "false",
    # Messages are kept as written.
    "commit.cleanup": "verbatim",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    # Patches have one form whatever the user prefers to look at.
    "core.abbrev": "40",
    "core.quotePath": "true",
    "core.whitespace": "blank-at-eol,space-before-tab",
    "apply.whitespace": "nowarn",
    "apply.ignoreWhitespace": "no",
    "diff.algorithm": "myers",
    "diff.context": "3",
    "diff.interHunkContext": "0",
    "diff.indentHeuristic": "true",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "diff.srcPrefix": "a/",
    "diff.dstPrefix": "b/",
    "diff.relative": "false",
    "diff.renames": "false",
    "diff.submodule": "short",
    "diff.suppressBlankEmpty": "false",
    "diff.orderFile": "",
    "diff.external": "",
    "diff.ignoreSubmodules": "none",
    "format.attach": "",
    "format.coverLetter": "false",
    "format.encodeEmailHeaders": "true",
    "format.from": "false",
    "format.headers": "",
    "format.noPrefix": "false",
    "format.notes": "false",
    "format.numbered": "false",
    "format.pretty": "medium",
    "format.signature": "",
    "format.signOff": "false",
    "format.thread": "false",
    "format.useAutoBase": "false",
    "log.showSignature": "false",
    "mailinfo.scissors": "false",
    # Merging follows renames; a new file whose folder was renamed is for a person to place.
    "merge.renames": "true",
    "merge.directoryRenames": "conflict",
    "merge.renormalize": "false",
    "merge.default": "text",
    "notes.displayRef": "",
    "core.commentChar": "#",
    "init.defaultBranch": "main",
    "protocol.file.allow": "always",
    "safe.directory": "*",
}
#: An empty value is not the same as unset for these, so that they are left out of ``-c``.
_ONLY_WHEN_SET = ("diff.external", "diff.orderFile", "format.attach", "format.headers", "notes.displayRef")

#: The identity of commits that the tools make. Authors of patches keep theirs.
IDENTITY = ("vllm-stack", "vllm-stack@localhost.invalid")
#: 2020-01-01T00:00:00Z. git refuses the epoch itself.
EPOCH = "1577836800 +0000"

MINIMUM_VERSION = (2, 34)


class GitError(StackError):
    """git failed where it was expected to succeed."""

    kind = "git"

    def __init__(self, result: GitResult) -> None:
        shown = " ".join(result.arguments[:6])
        super().__init__(
            f"git {shown} failed with exit status {result.returncode}",
            details=result.stderr.decode("utf-8", "replace").strip().splitlines()[-20:],
        )
        self.result = result


@dataclass(frozen=True)
class GitResult:
    """What one git command did."""

    arguments: tuple[str, ...]
    returncode: int
    stdout: bytes = field(repr=False)
    stderr: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """Standard output without the final newline, decoded as UTF-8."""
        return self.stdout.decode("utf-8").rstrip("\n")

    @property
    def lines(self) -> list[str]:
        """Standard output as lines."""
        return self.text.splitlines()

    @property
    def fields(self) -> list[str]:
        """Standard output of a ``-z`` command as its parts."""
        return [part.decode("utf-8", "surrogateescape") for part in self.stdout.split(b"\0") if part]


@cache
def git_program() -> str:
    """Return the path of git. UsageError when it is absent."""
    program = shutil.which("git")
    if program is None:
        raise UsageError("git is not on the PATH", hint="install git 2.34 or newer")
    return program


def _arguments() -> list[str]:
    settings = (f"{key}={value}" for key, value in SETTINGS.items() if value or key not in _ONLY_WHEN_SET)
    return [part for setting in settings for part in ("-c", setting)]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which no configuration of the user or the machine reaches git."""
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR", "SYSTEMROOT") if key in os.environ}
    name, email = IDENTITY
    return {
        **kept,
        "HOME": os.devnull,
        "XDG_CONFIG_HOME": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        # A replacement object would stand in for what the pin names.
        "GIT_NO_REPLACE_OBJECTS": "1",
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_AUTHOR_NAME": name,
        "GIT_AUTHOR_EMAIL": email,
        "GIT_AUTHOR_DATE": EPOCH,
        "GIT_COMMITTER_NAME": name,
        "GIT_COMMITTER_EMAIL": email,
        "GIT_COMMITTER_DATE": EPOCH,
        **(extra or {}),
    }


@dataclass
class Kept:
    """What a repository has at hand while it is opened."""

    objects: Objects
    index: ScratchIndex | None = None

    def close(self) -> None:
        """End the process that reads objects, and remove the index."""
        self.objects.close()
        if self.index is not None:
            self.index.remove()


@dataclass(frozen=True)
class Git:
    """git on one repository that is named, never discovered.

    ``work_tree`` is None for a bare repository. A ``Git`` for a folder outside any repository
    (``git_dir`` None) serves commands that need none, such as ``mailinfo``.
    """

    git_dir: Path | None
    work_tree: Path | None = None
    kept: Kept | None = field(default=None, compare=False, repr=False)
    """What is kept for as long as it is :meth:`opened`; None at other times."""

    @classmethod
    def checkout(cls, folder: Path) -> Git:
        """Return git for the checkout at ``folder``."""
        return cls(git_dir=folder / ".git", work_tree=folder)

    def run(
        self,
        *arguments: str | Path,
        stdin: bytes = b"",
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> GitResult:
        """Run ``git *arguments`` and return what it did.

        Raises GitError when ``check`` is set and the exit status is not 0.
        """
        words = tuple(str(argument) for argument in arguments)
        completed = subprocess.run(
            [git_program(), *_arguments(), *words],
            input=stdin,
            capture_output=True,
            check=False,
            env=self._environment(env),
            cwd=cwd or self.work_tree or self.git_dir,
        )
        result = GitResult(words, completed.returncode, completed.stdout, completed.stderr)
        if check and completed.returncode:
            raise GitError(result)
        return result

    def grep(self, *arguments: str) -> bytes:
        """Return the lines of a commit that ``git grep`` finds, each as ``COMMIT:PATH NUL NUMBER NUL TEXT``.

        GitError when git could not search; finding nothing is no error.
        """
        plain = ("-n", "-z", "--no-color", "--no-column", "--no-heading", "--no-break")
        done = self.run("grep", *plain, *arguments, check=False)
        if done.returncode not in (0, 1):
            raise GitError(done)
        return done.stdout

    def popen(
        self, *arguments: str, stdout: int = subprocess.DEVNULL, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start ``git *arguments`` with pipes, for input or output that does not fit in memory."""
        return subprocess.Popen(
            [git_program(), *_arguments(), *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=self._environment(None),
            cwd=self.work_tree or self.git_dir,
        )

    def _environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        place = {} if self.git_dir is None else {"GIT_DIR": str(self.git_dir)}
        if self.work_tree is not None:
            place["GIT_WORK_TREE"] = str(self.work_tree)
        return clean_environment({**place, **(extra or {})})

    def resolve(self, revision: str) -> str:
        """Return the object id of ``revision``."""
        return self.run("rev-parse", "--verify", "--quiet", "--end-of-options", revision).text

    def exists(self, revision: str) -> bool:
        """Say whether ``revision`` names an object of this repository."""
        return self.run("cat-file", "-e", revision, check=False).returncode == 0

    @contextmanager
    def opened(self) -> Iterator[Git]:
        """Yield this git, which keeps what is costly to have anew for as long as the block runs.

        That is the process that reads objects (those that are made meanwhile are found too), and an index.
        It must not be given to another thread.
        """
        if self.kept is not None:
            yield self
            return
        kept = Kept(Objects(ObjectReader(self._start_reading)))
        try:
            yield replace(self, kept=kept)
        finally:
            kept.close()

    @property
    def unopened(self) -> Git:
        """The same git without what is kept: for another thread, which opens it for itself."""
        return replace(self, kept=None)

    @contextmanager
    def reading(self) -> Iterator[Objects]:
        """Yield what reads the objects of the repository."""
        with self.opened() as git:
            assert git.kept is not None  # noqa: S101 - `opened` sets it
            yield git.kept.objects

    def kept_index(self) -> ScratchIndex | None:
        """Return the index that is kept while the repository is opened; None at other times."""
        if self.kept is not None and self.kept.index is None:
            self.kept.index = ScratchIndex(self)
        return None if self.kept is None else self.kept.index

    def _start_reading(self) -> subprocess.Popen[bytes]:
        return self.popen("cat-file", "--batch", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def tree(self, commit: str) -> str:
        """Return the id of the tree of ``commit``."""
        with self.reading() as objects:
            return objects.tree(commit)

    def entry(self, commit: str, path: str) -> Entry | None:
        """Return mode and id of what ``commit`` has at ``path``; None when that is nothing."""
        with self.reading() as objects:
            return objects.find(commit, path)

    def data(self, blob: str) -> bytes:
        """Return the bytes of a blob."""
        with self.reading() as objects:
            return objects.blob(blob)

    def blob(self, commit: str, path: str) -> bytes:
        """Return the bytes of the file ``path`` in ``commit``. ObjectError when there is no such file."""
        with self.reading() as objects:
            return objects.file(commit, path)

    def blobs(self, commit: str, paths: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of several files of ``commit``. ObjectError when one of them is no file."""
        with self.reading() as objects:
            return {path: objects.file(commit, path) for path in paths}

    def status(self) -> list[str]:
        """Return the uncommitted changes of the checkout, one line each."""
        return self.run("status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames").fields


def require_git() -> tuple[int, ...]:
    """Return git's version. UsageError when it is older than MINIMUM_VERSION."""
    words = Git(None).run("version", cwd=Path(os.sep)).text.split()
    version = tuple(int(part) for part in words[2].split(".")[:3] if part.isdigit())
    if version < MINIMUM_VERSION:
        needed = ".".join(map(str, MINIMUM_VERSION))
        raise UsageError(f"git {words[2]} is too old", hint=f"install git {needed} or newer")
    return version
