"""Looking a release up: the files that a pin of it would name, from the index or from the last time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from vllm_stack.atomic import write_atomic
from vllm_stack.errors import IntegrityError, NetworkError
from vllm_stack.fetch import Fetcher
from vllm_stack.index import PackageIndex
from vllm_stack.learning import Learned, Learner
from vllm_stack.listing import Listing, ReleaseFiles
from vllm_stack.pins import Pin, PinnedFile, PinnedWheel
from vllm_stack.pip_config import PipConfig
from vllm_stack.progress import Progress, progress_for
from vllm_stack.sdist import read_member
from vllm_stack.tomlfile import Strict
from vllm_stack.verify import Verifier, WheelContents
from vllm_stack.wheelmeta import header_value, read_commit
from vllm_stack.wheelzip import WheelArchive

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_stack.workspace import Workspace


class KnownRelease(Strict):
    """What is known of a release. It is kept in the cache, for work without network."""

    sdist: PinnedFile
    wheels: tuple[PinnedWheel, ...] = ()
    #: As the sdist's version module gives it.
    commit: str | None = None
    #: Why the release cannot be pinned, one sentence each.
    lacks: tuple[str, ...] = ()
    #: What a person has to know of it, one sentence each.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """Looks up releases of the project that ``pin`` is of."""

    workspace: Workspace
    pin: Pin
    offline: bool
    #: Where to look. None: what pip's configuration says, read when it is needed.
    given_index: PackageIndex | None = None
    progress: Progress = field(default_factory=progress_for)

    @cached_property
    def index(self) -> PackageIndex:
        """The user's package sources."""
        return self.given_index or PackageIndex(PipConfig.load())

    @cached_property
    def listing(self) -> Listing:
        """What they list of the project."""
        return Listing.load(self.index, self.pin.distribution)

    @cached_property
    def fetcher(self) -> Fetcher:
        """Gets files whose hash is known."""
        return Fetcher(self.workspace.downloads, self.offline, self.progress, self.given_index)

    def latest(self) -> Version:
        """Return the newest final release that is not yanked. NetworkError when it cannot be told."""
        if self.offline:
            raise NetworkError(
                f"--offline forbids to ask for the latest {self.pin.distribution}",
                hint="name a version that was looked up before",
            )
        return self.listing.latest()

    def release(self, version: Version) -> KnownRelease:
        """Return what is known of a release; what is learnt is kept for the next time.

        Raises UsageError when there is no such release, NetworkError when it has no sdist, or cannot be
        looked up, and IntegrityError when the index names other bytes than the last time.
        """
        path = self.workspace.cache / "releases" / f"{self.pin.distribution}-{version}.json"
        before = _recall(path)
        if self.offline:
            return before or self._never_seen(version, path)
        known = self._look_up(version)
        if before is not None:
            _require_same(before, known, path)
        known = self._with_commit(known, before)
        if known != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, (known.model_dump_json(indent=2) + "\n").encode())
        return known

    def _never_seen(self, version: Version, path: Path) -> KnownRelease:
        raise NetworkError(
            f"{self.pin.distribution} {version} was never looked up, and --offline forbids to do so",
            details=[f"looked for {path}"],
            hint="run the same command once without --offline",
        )

    def _look_up(self, version: Version) -> KnownRelease:
        architectures = [wheel.arch for wheel in self.pin.wheels]
        files = ReleaseFiles.choose(self.listing, version, architectures)
        learner = Learner(self.index, self.workspace.downloads, self.progress)
        sdist = learner.learn(files.sdist)
        wheels = {arch: learner.learn(listed) for arch, listed in files.wheels.items()}
        return KnownRelease(
            sdist=sdist.file,
            wheels=tuple(
                PinnedWheel.model_validate({"arch": arch, **dict(wheel.file)})
                for arch, wheel in wheels.items()
            ),
            lacks=files.lacks,
            notes=tuple(
                self._note(item, str(version)) for item in (sdist, *wheels.values()) if not item.vouched
            ),
        )

    def _note(self, learned: Learned, release: str) -> str:
        """Check a file that no index vouches for against what it says of itself, and say so."""
        path = self.fetcher.path_of(learned.file)
        if learned.file.filename.endswith(".whl"):
            self._check_wheel(path, release)
        else:
            require_release(path, self.pin, release)
        return (
            f"no package source gives a hash of {learned.file.filename}: its sha256 is that of the bytes "
            "that arrived; only what the file says of itself was checked"
        )

    def _check_wheel(self, path: Path, release: str) -> None:
        pin = self.pin.model_copy(update={"release": release})
        with WheelArchive.open(path) as archive:
            findings = Verifier(WheelContents(archive), pin, filename=path.name).run().findings
        # An official wheel is none of ours, which is as it must be.
        wrong = [
            f"{finding.subject}: {finding.message}" for finding in findings if finding.code != "unpatched"
        ]
        if wrong:
            raise IntegrityError(f"{path.name} is not a sound wheel of {release}", details=wrong)

    def _with_commit(self, known: KnownRelease, before: KnownRelease | None) -> KnownRelease:
        """Add the commit that the sdist says it was made from, where it does; it is read once."""
        name = self.pin.layout.version_file
        if name is None:
            return known
        if before is not None and before.commit is not None and before.sdist == known.sdist:
            return known.model_copy(update={"commit": before.commit})
        module = read_member(self.fetcher.fetch(self.pin.distribution, known.sdist), name)
        if module is None:
            missing = f"layout.version_file: the sdist has no {name}"
            return known.model_copy(update={"notes": (*known.notes, missing)})
        return known.model_copy(update={"commit": read_commit(module)})


def require_release(path: Path, pin: Pin, release: str | None) -> str:
    """Return the release that the sdist at ``path`` says it is.

    Raises IntegrityError when that is not one of ``pin``'s project, or not ``release``, or cannot be read.
    """
    info = read_member(path, "PKG-INFO")
    if info is None:
        raise IntegrityError(f"{path.name} has no PKG-INFO: it is not a source distribution")
    return checked_release(info, path.name, pin, release)


def checked_release(info: bytes, name: str, pin: Pin, release: str | None) -> str:
    """Return the version in the text of a PKG-INFO, which ``name`` is of; see :func:`require_release`."""
    project = header_value(info, "Name", source=f"the PKG-INFO of {name}")
    stated = header_value(info, "Version", source=f"the PKG-INFO of {name}")
    if canonicalize_name(project) != canonicalize_name(pin.distribution):
        raise IntegrityError(f"{name} is {project}, not {pin.distribution}")
    try:
        version = str(Version(stated))
    except InvalidVersion as error:
        raise IntegrityError(f"{name} has no valid version: {stated!r}") from error
    if release not in (None, version):
        raise IntegrityError(f"{name} is version {version}, not {release}")
    return version


def _recall(path: Path) -> KnownRelease | None:
    """Return what was learnt the last time; None when there is nothing that can be used."""
    try:
        return KnownRelease.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _require_same(before: KnownRelease, now: KnownRelease, path: Path) -> None:
    """Refuse a file that has other bytes under the same name than when it was first looked up."""
    first = {file.filename: file.sha256 for file in (before.sdist, *before.wheels)}
    for file in (now.sdist, *now.wheels):
        if first.get(file.filename, file.sha256) != file.sha256:
            raise IntegrityError(
                f"the package sources give {file.filename} with sha256 {file.sha256}; "
                f"when it was first looked up it had {first[file.filename]}",
                hint=f"an index never replaces a file; if yours may have, remove {path}",
            )
