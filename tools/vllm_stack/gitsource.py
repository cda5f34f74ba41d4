"""Upstream's repository as a source: bases made of its tags, and which commits touched what between two.

Everything comes from the address in the pin. The clone in the cache has commits and trees; contents are
fetched when a question needs them.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from vllm_stack.base import BASE_REF, Base, Origin, init_repository
from vllm_stack.classify import matches
from vllm_stack.connection import redact
from vllm_stack.errors import IntegrityError, NetworkError, UsageError
from vllm_stack.git import Git, GitError
from vllm_stack.hashing import sha256_bytes
from vllm_stack.history import History, UpstreamCommit
from vllm_stack.scratchindex import scratch_index

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.git import GitResult
    from vllm_stack.pins import Pin
    from vllm_stack.workspace import Workspace

__all__ = ["History", "TreeDifference", "UpstreamCommit", "UpstreamRepository", "compare_trees"]

#: Addresses whose answers are authentic, or the machine's own. Everything else, above all the helpers that
#: git runs for `ext::`, is refused.
_SCHEMES = ("https", "ssh", "file")
#: What of the user's environment decides how a server is reached.
_CONNECTION = (
    *(
        "all_proxy",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "ALL_PROXY",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
    ),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE", "SSH_AUTH_SOCK"),
)
#: Settings of a fetch that a repository's own configuration must not decide.
_FETCH = (
    *("-c", "fetch.prune=false", "-c", "fetch.pruneTags=false", "-c", "fetch.recurseSubmodules=false"),
    *("-c", "fetch.fsckObjects=false", "-c", "protocol.version=2"),
    *("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance"),
)
#: The name of the file that a process locks while it fetches.
_LOCK = "vllm-stack.lock"
_HEX = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class UpstreamRepository:
    """Upstream's repository, and its clone in the cache."""

    workspace: Workspace
    distribution: str
    url: str
    offline: bool = False

    @classmethod
    def of(cls, workspace: Workspace, pin: Pin, *, offline: bool = False) -> UpstreamRepository:
        """Return the repository that ``pin`` names. UsageError for an address that is not to be trusted."""
        scheme = urlsplit(pin.git).scheme
        if scheme not in _SCHEMES:
            raise UsageError(
                f"the pin's git address {redact(pin.git)} cannot be used as a source",
                hint=f"it has to begin with one of {', '.join(f'{name}://' for name in _SCHEMES)}",
            )
        return cls(workspace, pin.distribution, pin.git, offline)

    @property
    def folder(self) -> Path:
        """The clone's folder."""
        key = sha256_bytes(self.url.encode())[:16]
        return self.workspace.cache / "clones" / f"{self.distribution}-{key}.git"

    # -- revisions

    def commit(self, revision: str, expected: str | None = None) -> str:
        """Return the commit of a tag, a branch or a full commit id, fetched if need be.

        A tag that is in the clone is not asked for again. Raises UsageError when there is no such revision,
        NetworkError when the repository cannot be reached or (offline) the revision was never fetched, and
        IntegrityError for another commit than ``expected`` (the beginning of an id).
        """
        found = self._commit(revision)
        if expected is not None and not found.startswith(expected):
            raise IntegrityError(
                f"{revision} of {redact(self.url)} is commit {found}, and must be {expected}",
                hint=f"upstream moved the tag, or the clone is damaged: compare, then remove {self.folder}",
            )
        return found

    def _commit(self, revision: str) -> str:
        clone = self._clone()
        local = self._local(clone, revision)
        if local is None and self.offline:
            raise NetworkError(
                f"{revision} is not in the clone {self.folder}, and --offline forbids to fetch it",
                hint="run the same command once without --offline",
            )
        if local is None:
            self._fetch(clone, "--filter=blob:none", "origin", self._refspec(clone, revision))
            branch = f"refs/remotes/origin/{revision}^{{commit}}"
            local = self._local(clone, revision) or clone.run("rev-parse", "--quiet", "--verify", branch).text
        return local

    @staticmethod
    def _local(clone: Git, revision: str) -> str | None:
        """Return the commit of what does not move, a tag or a commit by its id, if it was fetched."""
        name = f"refs/commits/{revision}" if _HEX.fullmatch(revision) else f"refs/tags/{revision}"
        found = clone.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
        return found.text if found.returncode == 0 else None

    def _refspec(self, clone: Git, revision: str) -> str:
        """Return what to fetch for a revision. UsageError when upstream has none of that name."""
        if _HEX.fullmatch(revision):
            return f"{revision}:refs/commits/{revision}"
        if (
            revision.startswith("-")
            or clone.run("check-ref-format", f"refs/tags/{revision}", check=False).returncode
        ):
            raise UsageError(f"{revision!r} cannot be the name of a git revision")
        for kind, place in (("tags", "refs/tags"), ("heads", "refs/remotes/origin")):
            listed = self._reach(clone, "ls-remote", "--exit-code", "origin", f"refs/{kind}/{revision}")
            if listed.returncode == 0:
                return f"+refs/{kind}/{revision}:{place}/{revision}"
        raise UsageError(
            f"{redact(self.url)} has no tag and no branch {revision}",
            hint="name a tag, a branch, or a commit by its 40 hex digits",
        )

    # -- talking to upstream

    def _clone(self) -> Git:
        """Return git for the clone, made empty if there is none."""
        if not self.folder.is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".clone-", dir=self.folder.parent) as temporary:
                git = init_repository(Path(temporary) / "clone.git", bare=True)
                git.run("config", "remote.origin.url", self.url)
                with suppress(OSError):  # another process made it meanwhile
                    (Path(temporary) / "clone.git").rename(self.folder)
        return Git(self.folder)

    @property
    def environment(self) -> dict[str, str]:
        """What git may reach: upstream's kind of address, or (offline) nothing."""
        kept = {name: os.environ[name] for name in _CONNECTION if name in os.environ}
        # Nobody is there to be asked about a host or a password.
        return {
            **kept,
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            "GIT_ALLOW_PROTOCOL": "" if self.offline else urlsplit(self.url).scheme,
        }

    def _reach(self, git: Git, *words: str) -> GitResult:
        """Run a command that asks upstream. NetworkError when that fails; ls-remote may find nothing (2)."""
        result = git.run(*words, env=self.environment, check=False)
        if result.returncode not in (0, 2) or (result.returncode and "ls-remote" not in words):
            raise NetworkError(
                f"cannot reach {redact(self.url)}",
                details=[redact(line) for line in GitError(result).details],
                hint="the address is that of `git` in the pin; `--source sdist` does without it",
            )
        return result

    def _fetch(self, git: Git, *words: str) -> None:
        assert git.git_dir is not None  # noqa: S101 - a clone or a base
        with _alone(git.git_dir):
            self._reach(git, *_FETCH, *words)

    # -- what others ask for

    def base(self, release: str, commit: str, generated: tuple[str, ...]) -> Base:
        """Return a base with the whole tree of ``commit`` (its full id), less what ``generated`` names.

        It is a commit without parents and with fixed author, dates and message, as that of an sdist, so that
        the same commit of upstream's gives the same base everywhere.
        """
        lines = (f"Source: {redact(self.url)}", f"Commit: {commit}")
        origin = Origin(self.distribution, release, lines)
        return Base.ensure_from(
            self.workspace, origin, lambda git, message: self._import(git, message, commit, generated)
        )

    def _import(self, git: Git, message: bytes, commit: str, generated: tuple[str, ...]) -> None:
        if self.offline:
            raise NetworkError(
                f"the files of {commit} were never fetched, and --offline forbids to do so",
                hint="run the same command once without --offline",
            )
        git.run("config", "remote.origin.url", self.url)
        self._fetch(git, "--depth=1", "origin", f"{commit}:refs/fetched")
        tree = _without(git, commit, generated)
        imported = git.run("commit-tree", tree, "-F", "-", stdin=message).text
        git.run("update-ref", BASE_REF, imported)
        # What is left is complete in itself: history is none of a base's business.
        git.run("update-ref", "-d", "refs/fetched")
        assert git.git_dir is not None  # noqa: S101 - new_base makes it
        (git.git_dir / "shallow").unlink(missing_ok=True)

    def history(self, old: str, new: str) -> History:
        """Return what can be asked about the commits between two (full ids) that were fetched."""
        return History(self._clone(), old, new, self.environment)

    def describe(self, commit: str, tags: str) -> str:
        """Return a version for a commit that is no release: the next one's, with ``.devN``.

        ``tags`` is the pattern of the tags of releases, e.g. ``v*``.
        """
        clone = self._clone()
        if not self.offline:
            self._fetch(clone, "--filter=blob:none", "origin", f"+refs/tags/{tags}:refs/tags/{tags}")
        found = clone.run("describe", "--tags", "--long", "--match", tags, commit, check=False)
        if found.returncode:
            return f"0.dev{clone.run('rev-list', '--count', commit).text}"
        tag, count, _ = found.text.rsplit("-", 2)
        prefix = tags.partition("*")[0]
        return _next_development(tag.removeprefix(prefix), count)


@dataclass(frozen=True)
class TreeDifference:
    """How the files of a git base differ from those of a release's sdist."""

    differing: tuple[str, ...]
    only_git: tuple[str, ...]
    only_sdist: tuple[str, ...]


def compare_trees(git_base: Base, sdist_base: Base) -> TreeDifference:
    """Compare two bases by paths, modes and contents."""
    ours, theirs = _files(git_base), _files(sdist_base)
    return TreeDifference(
        differing=tuple(sorted(path for path in ours.keys() & theirs.keys() if ours[path] != theirs[path])),
        only_git=tuple(sorted(ours.keys() - theirs.keys())),
        only_sdist=tuple(sorted(theirs.keys() - ours.keys())),
    )


def _files(base: Base) -> dict[str, str]:
    """Return mode, type and id of each file."""
    entries = base.git.run("ls-tree", "-r", "-z", "--full-tree", base.commit).fields
    return {path: fields for fields, _, path in (entry.partition("\t") for entry in entries)}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a repository of the cache, waiting for it.

    Nobody else works in it then, so that git's own lock files are those of runs that were killed.
    """
    with (folder / _LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in (*folder.glob("*.lock"), *(folder / "refs").rglob("*.lock")):
            if left.name != _LOCK:
                left.unlink(missing_ok=True)
        yield


def _next_development(release: str, count: str) -> str:
    """Return the version of ``count`` commits after ``release``, as setuptools-scm guesses it."""
    try:
        near = Version(release)
    except InvalidVersion:
        return f"0.dev{count}"
    following = [*near.release[:-1], near.release[-1] + (0 if near.is_prerelease else 1)]
    return f"{'.'.join(map(str, following))}.dev{count}"


def _without(git: Git, commit: str, generated: tuple[str, ...]) -> str:
    """Return the tree of ``commit`` less the paths that ``generated`` names."""
    paths = git.run("ls-tree", "-r", "-z", "--name-only", commit).fields
    dropped = [path for path in paths if matches(path, generated)]
    if not dropped:
        return git.tree(commit)
    with scratch_index(git, commit) as index:
        index.put(dict.fromkeys(dropped))
        return index.write()
