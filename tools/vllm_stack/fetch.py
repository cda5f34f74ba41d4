"""Fetching pinned files into a cache that holds verified files alone.

The cache is content addressed: ``<folder>/<sha256>/<file name>``. A file is hashed while it arrives and
again before each later use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_stack.errors import IntegrityError, NetworkError, StackError, UsageError
from vllm_stack.hashing import sha256_file
from vllm_stack.index import Candidate, PackageIndex, not_found
from vllm_stack.pip_config import PipConfig
from vllm_stack.progress import Progress, progress_for
from vllm_stack.transfer import (
    BrokenTransferError,
    PartFile,
    RangeRefusedError,
    SourceError,
    Transfer,
    WrongBytesError,
    claim,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_stack.pins import PinnedFile

#: A broken transfer that got this share of the file further does not count as a failed try, so that a poor
#: line ends somewhere and a large file still arrives over it.
_WORTHWHILE = 0.01
#: Seconds that no wait between two tries exceeds.
_LONGEST_WAIT = 30.0


@dataclass(frozen=True)
class Fetched:
    """A verified file in the cache."""

    path: Path
    from_cache: bool
    #: Where it was downloaded from, without credentials; None when it came from the cache.
    source: str | None = None


@dataclass
class _Findings:
    """What the sources had instead of the file."""

    absent: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def error(self, file: PinnedFile) -> StackError:
        if not self.wrong:
            return not_found(file.filename, self.absent)
        return IntegrityError(
            f"{file.filename} must have sha256 {file.sha256}, but {'; '.join(self.wrong)}",
            details=self.absent,
            hint="nothing of it was kept; check the pin in upstream/ and the source",
        )


@dataclass(frozen=True)
class Fetcher:
    """Gets pinned files from the cache or, unless ``offline``, from the user's package sources."""

    folder: Path
    offline: bool = False
    progress: Progress = field(default_factory=progress_for)
    #: Where to look. None: what pip's configuration says, read when it is needed.
    index: PackageIndex | None = None
    sleep: Callable[[float], None] = time.sleep

    def fetch(self, distribution: str, file: PinnedFile) -> Path:
        """Return the path of the verified ``file`` of ``distribution``; see :meth:`obtain`."""
        return self.obtain(distribution, file).path

    def obtain(self, distribution: str, file: PinnedFile) -> Fetched:
        """Return the verified ``file`` of ``distribution`` and where it came from.

        Raises NetworkError when no source gives it, IntegrityError when the sources (offline: the cache)
        have other bytes, of which nothing is left behind, and UsageError when the cache cannot be used.
        """
        path = self.path_of(file)
        problem = _problem(path, file)
        if problem is None:
            return Fetched(path, from_cache=True)
        if self.offline:
            raise _offline_error(path, file, problem)
        with claim(path, waiting=lambda: self._note_waiting(file)) as part:
            # Another process may have fetched it while this one waited.
            problem = _problem(path, file)
            if problem is None:
                return Fetched(path, from_cache=True)
            if problem:
                self.progress.note(f"{file.filename}: the cached file {problem}; removed, fetching it anew")
                _remove(path)
            source = self._download(part, distribution, file)
            part.commit(path)
        return Fetched(path, from_cache=False, source=source)

    def path_of(self, file: PinnedFile) -> Path:
        """Return where ``file`` lies when it is in the cache."""
        return self.folder / file.sha256 / file.filename

    def _note_waiting(self, file: PinnedFile) -> None:
        self.progress.note(f"{file.filename}: another process is fetching it; waiting")

    @cached_property
    def _sources(self) -> PackageIndex:
        return PackageIndex(PipConfig.load()) if self.index is None else self.index

    def _download(self, part: PartFile, distribution: str, file: PinnedFile) -> str:
        """Fill ``part`` from the first source that has the pinned bytes, and return its name."""
        findings = _Findings()
        for result in self._sources.search(distribution, file.filename):
            if not isinstance(result, Candidate):
                findings.absent.append(str(result))
                continue
            try:
                self._receive(part, result, file)
            except SourceError as error:
                findings.absent.append(f"{result.source}: {error}")
            except WrongBytesError as error:
                findings.wrong.append(f"{result.source} {error}")
                self.progress.note(f"{file.filename}: {findings.wrong[-1]}; nothing of it is kept")
            else:
                return result.source
            part.restart()
        raise findings.error(file)

    def _receive(self, part: PartFile, candidate: Candidate, file: PinnedFile) -> None:
        _check_offer(candidate, file)
        with self.progress.transfer(f"{file.filename} from {candidate.source}", file.size) as advance:
            config = self._sources.config
            transfer = Transfer(self._sources.session, candidate.url, file.size, config.timeout, advance)
            self._persist(transfer, part)
            if part.sha256 != file.sha256 and part.mixed:
                # Parts of two files, perhaps: only bytes of one answer prove that the source is wrong.
                transfer.ranges = False
                self._persist(transfer, part)
            if part.sha256 != file.sha256:
                raise WrongBytesError(f"gives sha256 {part.sha256}")

    def _persist(self, transfer: Transfer, part: PartFile) -> None:
        """Try until ``part`` is full. SourceError after as many tries in vain as pip's ``retries`` allows."""
        failures, best = 0, part.position
        while True:
            try:
                return transfer.receive(part)
            except RangeRefusedError:
                continue  # at most once: the transfer does not ask for a range again
            except BrokenTransferError as error:
                if part.position - best >= max(1, transfer.size * _WORTHWHILE):
                    failures, best = 0, part.position
                failures += 1
                if failures > self._sources.config.retries:
                    raise SourceError(f"the transfer broke off {failures} times: {error}") from error
                self.sleep(min(self._sources.backoff * 2 ** (failures - 1), _LONGEST_WAIT))


def _check_offer(candidate: Candidate, file: PinnedFile) -> None:
    """Refuse a place whose index already says that it has something else."""
    if candidate.sha256 not in (None, file.sha256):
        raise WrongBytesError(f"lists it with sha256 {candidate.sha256}")
    if candidate.size not in (None, file.size):
        raise WrongBytesError(f"lists it with {candidate.size} bytes, the pinned file has {file.size}")


def _problem(path: Path, file: PinnedFile) -> str | None:
    """Return None for the pinned file, "" when there is none, else what is wrong with it."""
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"has {size} bytes instead of {file.size}"
        actual = sha256_file(path)
    except FileNotFoundError:
        # A dangling link is in the way of nothing: the download replaces it.
        return ""
    except OSError as error:
        raise UsageError(
            f"cannot read the cached file {path}: {error.strerror or error}",
            hint="name another cache folder with --cache-dir or VLLM_STACK_CACHE",
        ) from error
    return None if actual == file.sha256 else f"has sha256 {actual} instead of {file.sha256}"


def _offline_error(path: Path, file: PinnedFile, problem: str) -> StackError:
    if not problem:
        return NetworkError(
            f"{file.filename} is not in the cache, and --offline forbids to download it",
            details=[f"looked for {path}"],
            hint="run `vllm-stack fetch` once with network access, or leave --offline out",
        )
    _remove(path)
    return IntegrityError(
        f"the cached file {path} {problem}; it was removed",
        hint="run without --offline to fetch it anew",
    )


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise IntegrityError(
            f"the cached file {path} is corrupt and cannot be removed: {error.strerror or error}",
            hint="remove it, or name another cache with --cache-dir or VLLM_STACK_CACHE",
        ) from error
