"""Releases: what the user's package sources list of a project, by version."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from vllm_stack.errors import IntegrityError, NetworkError, UsageError
from vllm_stack.index import Miss, Offer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from packaging.tags import Tag

    from vllm_stack.index import PackageIndex

_MANYLINUX = re.compile(
    r"manylinux(?P<year>1|2010|2014)?(_(?P<major>\d+)_(?P<minor>\d+))?_(?P<arch>x86_64|aarch64)"
)
#: The glibc that manylinux tags with a year stand for (PEP 600).
_LEGACY = {"1": (2, 5), "2010": (2, 12), "2014": (2, 17)}
#: How many versions on each side an unknown one is answered with.
_NEIGHBOURS = 2


class UnknownReleaseError(UsageError):
    """The package sources have no such release of the project."""


@dataclass(frozen=True)
class ListedFile:
    """An archive of one release, with every source that lists it."""

    filename: str
    version: Version
    tags: frozenset[Tag]
    """Of a wheel; empty for a source archive."""
    offers: tuple[Offer, ...]
    """In pip's order of the sources."""

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel."""
        return bool(self.tags)

    @property
    def yanked(self) -> str | None:
        """Why every source has it yanked ("" when none says why); None unless all have."""
        reasons = [offer.yanked for offer in self.offers]
        if None in reasons:
            return None
        return next((reason for reason in reasons if reason), "")

    @property
    def sha256(self) -> str | None:
        """What the sources say; None when none says. IntegrityError when they contradict each other."""
        said = {offer.place.source: offer.place.sha256 for offer in self.offers if offer.place.sha256}
        if len(set(said.values())) > 1:
            raise IntegrityError(
                f"the package sources have different files called {self.filename}",
                details=[f"{source}: sha256 {digest}" for source, digest in said.items()],
                hint="take the source that is not to be trusted out of pip's configuration",
            )
        return next(iter(said.values()), None)

    @property
    def size(self) -> int | None:
        """Bytes, where a source says so."""
        return next((offer.place.size for offer in self.offers if offer.place.size), None)


@dataclass(frozen=True)
class Listing:
    """All that the sources list of one project."""

    distribution: str
    files: tuple[ListedFile, ...]
    misses: tuple[Miss, ...]

    @classmethod
    def load(cls, index: PackageIndex, distribution: str) -> Listing:
        """Ask every source for its list. NetworkError when none has anything of ``distribution``."""
        results = list(index.listing(distribution))
        offers = [result for result in results if isinstance(result, Offer)]
        misses = tuple(result for result in results if isinstance(result, Miss))
        listing = cls(distribution, _grouped(offers, distribution), misses)
        if not listing.files:
            raise NetworkError(
                f"no package source has anything of {distribution}",
                details=[str(miss) for miss in misses],
                hint="the sources are those of pip: `python -m pip config debug` shows where each comes from",
            )
        return listing

    @property
    def versions(self) -> tuple[Version, ...]:
        """All versions that any source lists, oldest first."""
        return tuple(sorted({file.version for file in self.files}))

    def release(self, version: Version) -> tuple[ListedFile, ...]:
        """Return the files of a release.

        Raises UnknownReleaseError, which names close ones, when there is no such release; NetworkError
        instead when a source that may have it did not answer.
        """
        found = tuple(file for file in self.files if file.version == version)
        if found:
            return found
        message = f"there is no {self.distribution} {version} in the package sources"
        if any(miss.failed for miss in self.misses):
            raise NetworkError(message, details=[str(miss) for miss in self.misses if miss.failed])
        raise UnknownReleaseError(message, hint=f"there are {', '.join(self._close(version))}")

    def latest(self) -> Version:
        """Return the newest final release that is not yanked as a whole.

        Raises NetworkError when there is none, or when a source that may have a newer one did not answer.
        """
        failed = [str(miss) for miss in self.misses if miss.failed]
        if failed:
            message = f"cannot tell the latest {self.distribution}: a package source did not answer"
            raise NetworkError(message, details=failed)
        usable = {file.version for file in self.files if file.yanked is None}
        final = [version for version in usable if not version.is_prerelease]
        if not final:
            raise NetworkError(f"the package sources have no final release of {self.distribution}")
        return max(final)

    def _close(self, version: Version) -> list[str]:
        """Return the neighbours of a version that does not exist, and the newest."""
        names = [str(known) for known in self.versions]
        place = bisect.bisect(self.versions, version)
        near = names[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS]
        return [name for name in names if name in near or name == names[-1]]


@dataclass(frozen=True)
class ReleaseFiles:
    """Which of a release's files a pin would take."""

    sdist: ListedFile
    wheels: dict[str, ListedFile]
    """By architecture, in the order in which they were asked for."""
    lacks: tuple[str, ...]
    """What keeps the release from being pinned, one sentence each."""

    @classmethod
    def choose(cls, listing: Listing, version: Version, architectures: Iterable[str]) -> ReleaseFiles:
        """Choose among what is listed of a release. NetworkError when it has no sdist that can be read."""
        files = listing.release(version)
        wanted = tuple(architectures)
        found = {arch: _wheel(files, arch) for arch in wanted}
        wheels = {arch: wheel for arch, wheel in found.items() if wheel is not None}
        sdist = _sdist(listing, files)
        missing = [arch for arch in wanted if arch not in wheels]
        lacks = [_no_wheels(listing, version, wheels, missing)] if missing else []
        lacks += _yanked(version, [sdist, *wheels.values()])
        return cls(sdist, wheels, tuple(lacks))


def _sdist(listing: Listing, files: tuple[ListedFile, ...]) -> ListedFile:
    archives = [file for file in files if file.filename.endswith(".tar.gz")]
    if archives:
        return archives[0]
    raise NetworkError(
        f"{listing.distribution} {files[0].version} has no source archive (.tar.gz) in any package source",
        details=[f"there is {file.filename}" for file in files],
        hint="a release may still be on its way to the index: try again later, or name its sdist's path",
    )


def _wheel(files: tuple[ListedFile, ...], arch: str) -> ListedFile | None:
    """Return the wheel of an architecture that runs on most systems; None when there is none."""
    fitting = [(_demands(file, arch), file.filename, file) for file in files if file.is_wheel]
    able = [(demands, name, file) for demands, name, file in fitting if demands is not None]
    return min(able)[2] if able else None


def _demands(file: ListedFile, arch: str) -> tuple[int, int, int] | None:
    """Return what a manylinux wheel asks for: one interpreter (0 or 1), glibc; None for any other wheel."""
    platforms = [_MANYLINUX.fullmatch(tag.platform) for tag in file.tags]
    versions = [
        (int(match["major"]), int(match["minor"])) if match["major"] else _LEGACY[match["year"]]
        for match in platforms
        if match is not None and match["arch"] == arch
    ]
    if len(versions) < len(platforms):
        return None
    return int(any(tag.abi != "abi3" for tag in file.tags)), *min(versions)


def _no_wheels(listing: Listing, version: Version, found: Iterable[str], missing: list[str]) -> str:
    there = ", ".join(found)
    lacking = f"{listing.distribution} {version} has no Linux wheel for {', '.join(missing)}"
    return f"{lacking}; there is one for {there}" if there else f"{lacking}: only its sdist can be used"


def _yanked(version: Version, files: Iterable[ListedFile]) -> list[str]:
    reasons = [file.yanked for file in files if file.yanked is not None]
    if not reasons:
        return []
    reason = next((reason for reason in reasons if reason), "no reason is given")
    return [f"{version} was yanked by its authors: {reason}"]


def _grouped(offers: Iterable[Offer], distribution: str) -> tuple[ListedFile, ...]:
    groups: dict[str, list[Offer]] = {}
    for offer in offers:
        groups.setdefault(offer.filename, []).append(offer)
    files = [_listed(filename, tuple(group), distribution) for filename, group in groups.items()]
    return tuple(file for file in files if file is not None)


def _listed(filename: str, offers: tuple[Offer, ...], distribution: str) -> ListedFile | None:
    """Return the file, or None for one that is no archive of ``distribution``."""
    try:
        if filename.endswith(".whl"):
            name, version, _, tags = parse_wheel_filename(filename)
        else:
            (name, version), tags = parse_sdist_filename(filename), frozenset()
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None  # names from before the specification; such a release cannot be pinned
    if name != canonicalize_name(distribution):
        return None
    return ListedFile(filename, version, tags, offers)
