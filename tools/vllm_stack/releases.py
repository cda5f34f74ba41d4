"""Candidates: the release that a stack is to be moved to or tried on, found, verified and imported.

What is wanted is a version, ``latest``, the path of a source archive or of an unpacked one, or, with a git
source, any revision of upstream's repository.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.version import InvalidVersion, Version

from vllm_stack.base import Base, Origin, import_files
from vllm_stack.errors import NetworkError, UsageError
from vllm_stack.gitsource import UpstreamRepository, compare_trees
from vllm_stack.hashing import sha256_bytes, sha256_file
from vllm_stack.layoutcheck import check_layout
from vllm_stack.lookup import KnownRelease, Lookup, checked_release, require_release
from vllm_stack.pins import Pin, PinnedFile, parse_pin
from vllm_stack.pintext import Facts, candidate_pin, tag_of
from vllm_stack.report import some
from vllm_stack.sdist import read_folder
from vllm_stack.sources import base_of
from vllm_stack.tomlfile import read_toml_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_stack.git import Git
    from vllm_stack.gitsource import History, TreeDifference
    from vllm_stack.index import PackageIndex
    from vllm_stack.workspace import Workspace

Source = Literal["auto", "sdist", "git"]
Origins = Literal["index", "folder", "git"]


@dataclass(frozen=True)
class Candidate:
    """A release that patches can be tried on."""

    release: str
    pin: Pin
    """Of an incomplete candidate only what is known: such a pin is never written."""
    pin_text: str
    """The whole file, made from the present pin; of an incomplete candidate it says what is lacking."""
    base: Base
    source: Origins
    notes: tuple[str, ...] = ()
    """What a person has to know of it, one sentence each."""
    lacks: tuple[str, ...] = ()
    """Why it cannot become the pin, one sentence each; empty when it can."""

    @property
    def complete(self) -> bool:
        """Whether it can become the pin."""
        return not self.lacks

    def require_complete(self) -> None:
        """Raise UsageError, which says what is lacking, unless the candidate can become the pin."""
        if self.lacks:
            raise UsageError(
                f"{self.pin.distribution} {self.release} cannot become the pin",
                details=self.lacks,
                hint="`rebase-upstream --dry-run`, `matrix` and `explain` can use it as it is",
            )


def find_candidate(
    workspace: Workspace,
    target: str,
    wanted: str,
    *,
    source: Source = "auto",
    offline: bool = False,
    index: PackageIndex | None = None,
) -> Candidate:
    """Return the release that ``wanted`` names, imported, with the pin that fits it.

    ``wanted`` is a version, ``latest`` (the newest final one that is not yanked), the path of an sdist or of
    an unpacked one, or a git revision. ``source`` says what its base is made of: ``sdist``, upstream's
    repository (``git``), or what suits it (``auto``). ``index`` replaces the sources of pip's configuration.

    Raises UsageError for what does not exist or does not fit together, NetworkError when something cannot be
    reached or (offline) was never fetched, IntegrityError for files that are not what they should be.
    """
    return _Finder(workspace, target, offline, index).find(wanted, source)


@dataclass(frozen=True)
class _Finder:
    workspace: Workspace
    target: str
    offline: bool
    given_index: PackageIndex | None

    @cached_property
    def text(self) -> str:
        return read_toml_text(self.workspace.pin_file(self.target))

    @cached_property
    def pin(self) -> Pin:
        return parse_pin(self.text, source=str(self.workspace.pin_file(self.target)))

    @cached_property
    def lookup(self) -> Lookup:
        return Lookup(self.workspace, self.pin, self.offline, self.given_index)

    @cached_property
    def repository(self) -> UpstreamRepository:
        return UpstreamRepository.of(self.workspace, self.pin, offline=self.offline)

    def find(self, wanted: str, source: Source) -> Candidate:
        if source != "git" and _is_path(wanted):
            return self._local(Path(wanted).expanduser())
        version = self.lookup.latest() if wanted == "latest" else _public_version(wanted)
        if version is None and source != "sdist":
            return self._revision(wanted)
        if version is None:
            raise UsageError(f"{wanted} is no version: a git revision needs --source git")
        return self._tag(version) if source == "git" else self._release(version)

    def _release(self, version: Version) -> Candidate:
        if str(version) == self.pin.release:
            base = base_of(self.workspace, self.pin, offline=self.offline)
            return Candidate(self.pin.release, self.pin, self.text, base, "index")
        return self._candidate(str(version), self.lookup.release(version), "index", self._sdist_base)

    def _sdist_base(self, pin: Pin) -> Base:
        found = Base.find(self.workspace, pin)
        if found is not None:
            return found
        return Base.ensure(self.workspace, pin, self.lookup.fetcher.fetch(pin.distribution, pin.sdist))

    def _candidate(
        self,
        release: str,
        known: KnownRelease,
        source: Origins,
        import_base: Callable[[Pin], Base],
        *,
        tag: str | None = None,
    ) -> Candidate:
        pin, text = self._facts(release, tag or tag_of(self.pin, release), known)
        base = import_base(pin)
        present = base_of(self.workspace, self.pin, offline=self.offline)
        notes = (*known.notes, *check_layout(pin.layout, present, base))
        return Candidate(release, pin, text, base, source, notes, known.lacks)

    def _facts(self, release: str, tag: str, known: KnownRelease) -> tuple[Pin, str]:
        facts = Facts(release, tag, known.commit, known.sdist, known.wheels, known.lacks)
        return candidate_pin(self.pin, self.text, facts)

    # -- upstream's repository

    def _tag(self, version: Version) -> Candidate:
        """Return the candidate of a release whose base is made of its tag, and compared with its sdist."""
        release, tag = str(version), tag_of(self.pin, str(version))
        present = KnownRelease(sdist=self.pin.sdist, wheels=self.pin.wheels, commit=self.pin.commit)
        known = present if release == self.pin.release else self.lookup.release(version)
        commit = self.repository.commit(tag, expected=known.commit)
        base = self.repository.base(release, commit, self.pin.layout.generated)
        known = known.model_copy(update={"commit": known.commit or commit})
        sdist = self._sdist_base(self._facts(release, tag, known)[0])
        known = _compared(known, compare_trees(base, sdist), tag)
        return self._candidate(release, known, "git", lambda _: base)

    def _revision(self, revision: str) -> Candidate:
        """Return the candidate of a commit that is no release."""
        commit = self.repository.commit(revision)
        release = self.repository.describe(commit, tag_of(self.pin, "*"))
        base = self.repository.base(release, commit, self.pin.layout.generated)
        # Never fetched: only the id tells it from other candidates.
        file = PinnedFile(filename="commit.tar.gz", sha256=sha256_bytes(commit.encode()), size=1)
        lacks = (f"{revision} of upstream's repository is no release: there are no files to pin",)
        known = KnownRelease(sdist=file, commit=commit, lacks=lacks)
        return self._candidate(release, known, "git", lambda _: base, tag=revision)

    # -- archives and folders

    def _local(self, path: Path) -> Candidate:
        if path.is_dir():
            return self._folder(path)
        if not path.is_file():
            raise UsageError(f"there is no file or folder {path}")
        return self._archive(path)

    def _archive(self, path: Path) -> Candidate:
        release = require_release(path, self.pin, None)
        file = PinnedFile(
            filename=self._sdist_name(release), sha256=sha256_file(path), size=path.stat().st_size
        )
        known = self._pinnable(release, file)
        return self._candidate(release, known, "folder", lambda pin: Base.ensure(self.workspace, pin, path))

    def _sdist_name(self, release: str) -> str:
        """Return what an index calls the sdist of a release; a copy may have any name."""
        return self.pin.sdist.filename.replace(self.pin.release, release)

    def _pinnable(self, release: str, file: PinnedFile) -> KnownRelease:
        """Return what the index has of the release, if its sdist is the very ``file``."""
        if release == self.pin.release and file.sha256 == self.pin.sdist.sha256:
            return KnownRelease(sdist=self.pin.sdist, wheels=self.pin.wheels, commit=self.pin.commit)
        alone = "its sources are a local archive, so that there are no wheels to pin"
        try:
            known = self.lookup.release(Version(release))
        except (NetworkError, UsageError) as error:
            return KnownRelease(sdist=file, lacks=(alone, error.message))
        if known.sdist.sha256 == file.sha256:
            return known
        other = f"the sdist of {release} in the index is another file, of sha256 {known.sdist.sha256}"
        return KnownRelease(sdist=file, lacks=(alone, other))

    def _folder(self, folder: Path) -> Candidate:
        info = folder / "PKG-INFO"
        if not info.is_file():
            raise UsageError(
                f"{folder} is not an unpacked source distribution: it has no PKG-INFO",
                hint="of a git repository name a revision, with --source git",
            )
        release = checked_release(info.read_bytes(), str(info), self.pin, None)
        digest = self._digest(folder)
        origin = Origin(self.pin.distribution, release, ("Source: an unpacked archive", f"Sha256: {digest}"))
        base = Base.ensure_from(self.workspace, origin, lambda *to: self._import_folder(folder, *to))
        # Never fetched: only the hash, which is the folder's, tells it from other candidates.
        file = PinnedFile(filename="unpacked.tar.gz", sha256=digest, size=1)
        lacks = ("its sources are a local folder, so that there are no files to pin",)
        return self._candidate(release, KnownRelease(sdist=file, lacks=lacks), "folder", lambda _: base)

    def _import_folder(self, folder: Path, git: Git, message: bytes) -> None:
        import_files(git, message, read_folder(folder, self.pin.layout))

    def _digest(self, folder: Path) -> str:
        """Return the sha256 over names, modes and contents of a folder's files."""
        files = read_folder(folder, self.pin.layout)
        lines = (f"{file.mode} {sha256_bytes(file.data)} {file.path}\0" for file in files)
        return sha256_bytes("".join(lines).encode("utf-8", "surrogateescape"))


def history_to(
    workspace: Workspace, present: Pin, candidate: Candidate, *, offline: bool = False
) -> History | None:
    """Return upstream's commits between the present pin and a candidate; None unless its source is git."""
    if candidate.source != "git":
        return None
    return history_between(workspace, present, candidate.pin, offline=offline)


def history_between(workspace: Workspace, present: Pin, other: Pin, *, offline: bool = False) -> History:
    """Return upstream's commits between the tags of two pins, whose commits they must be."""
    repository = UpstreamRepository.of(workspace, present, offline=offline)
    old, new = (repository.commit(pin.tag, expected=pin.commit) for pin in (present, other))
    return repository.history(old, new)


#: How many paths a note names.
_NAMED = 5


def _compared(known: KnownRelease, difference: TreeDifference, tag: str) -> KnownRelease:
    """Return ``known`` with what its tag and its sdist do not agree on."""
    notes, lacks = list(known.notes), list(known.lacks)
    if difference.differing:
        lacks.append(
            f"files of the tag {tag} are not those of the sdist: {some(difference.differing, _NAMED)}"
        )
    if difference.only_git:
        notes.append(f"not in the sdist, so that no patch may touch it: {some(difference.only_git, _NAMED)}")
    if difference.only_sdist:
        notes.append(f"layout.generated: not in the tag {tag}: {some(difference.only_sdist, _NAMED)}")
    return known.model_copy(update={"notes": tuple(notes), "lacks": tuple(lacks)})


def _is_path(wanted: str) -> bool:
    """Say whether ``wanted`` is a path; a git revision too may hold a slash."""
    if wanted.endswith((".tar.gz", ".tgz", ".zip")) or wanted.startswith(("/", "./", "../", "~")):
        return True
    return wanted in (".", "..") or (os.sep in wanted and Path(wanted).exists())


def _public_version(wanted: str) -> Version | None:
    """Return the version that ``wanted`` is; None when it is none. UsageError for a local version."""
    try:
        version = Version(wanted)
    except InvalidVersion:
        return None
    if version.local:
        raise UsageError(f"{wanted} is a local version: an index has none", hint=f"name {version.public}")
    return version
