"""What the index does not say of a file: its size, or its hash.

A size is asked for with the headers alone. A hash that no source gives is that of the bytes that arrive now,
which proves nothing of where they come from: the file is then checked against what it says of itself, and
the user is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm_stack.connection import TRANSFER_ERRORS, explain
from vllm_stack.errors import IntegrityError, NetworkError
from vllm_stack.index import local_path
from vllm_stack.pins import PinnedFile
from vllm_stack.progress import megabytes
from vllm_stack.transfer import claim

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_stack.index import Candidate, PackageIndex
    from vllm_stack.listing import ListedFile
    from vllm_stack.progress import Progress

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Learned:
    """A file that can be pinned now."""

    file: PinnedFile
    vouched: bool
    """Whether the index gave its hash. If not, the verified file is in the cache."""


@dataclass(frozen=True)
class Learner:
    """Completes what the index says of files; ``folder`` is the cache of downloads."""

    index: PackageIndex
    folder: Path
    progress: Progress

    def learn(self, listed: ListedFile) -> Learned:
        """Return name, hash and size of a file.

        Raises NetworkError when no source that lists it answers, IntegrityError when sources disagree.
        """
        digest, size = listed.sha256, listed.size
        problems: list[str] = []
        for place in (offer.place for offer in listed.offers):
            try:
                size = size or self._size(place)
                if digest and size:
                    return Learned(
                        PinnedFile(filename=listed.filename, sha256=digest, size=size), vouched=True
                    )
                return self._download(listed.filename, place, digest)
            except TRANSFER_ERRORS as error:
                problems.append(f"{place.source}: {explain(error)}")
        raise NetworkError(f"no package source gave {listed.filename}", details=problems)

    def _size(self, place: Candidate) -> int | None:
        """Return the bytes of the file at ``place``; None when its server does not say."""
        if urlsplit(place.url).scheme == "file":
            return local_path(place.url).stat().st_size
        headers = {"Accept-Encoding": "identity"}
        timeout = self.index.config.timeout
        with self.index.session.head(
            place.url, headers=headers, timeout=timeout, allow_redirects=True
        ) as said:
            length = said.headers.get("Content-Length", "")
            return int(length) if said.ok and length.isdecimal() else None

    def _download(self, filename: str, place: Candidate, expected: str | None) -> Learned:
        """Fetch the file to learn its hash and size, and keep it in the cache."""
        missing = "size" if expected else "hash"
        self.progress.note(f"{filename}: {place.source} does not give its {missing}; fetching it")
        waiting = partial(self.progress.note, f"{filename}: another process is fetching it; waiting")
        with claim(self.folder / "learning" / filename, waiting=waiting) as part:
            part.restart()  # what an interrupted run left may be of another source
            for block in self._blocks(place):
                part.write(block)
            if expected not in (None, part.sha256):
                raise IntegrityError(
                    f"{place.source} gives {filename} with sha256 {part.sha256}, not {expected}"
                )
            file = PinnedFile(filename=filename, sha256=part.sha256, size=part.position)
            (self.folder / file.sha256).mkdir(parents=True, exist_ok=True)
            part.commit(self.folder / file.sha256 / filename)
        self.progress.note(f"{filename}: {megabytes(file.size)}, sha256 {file.sha256}")
        return Learned(file, vouched=expected is not None)

    def _blocks(self, place: Candidate) -> Iterator[bytes]:
        """Yield the bytes of the file. One of TRANSFER_ERRORS when they stop before its end."""
        if urlsplit(place.url).scheme == "file":
            with local_path(place.url).open("rb") as source:
                yield from iter(lambda: source.read(_BLOCK), b"")
            return
        headers, timeout = {"Accept-Encoding": "identity"}, self.index.config.timeout
        with self.index.session.get(place.url, headers=headers, stream=True, timeout=timeout) as response:
            response.raise_for_status()
            # An answer that is cut off is an error: urllib3 counts its bytes.
            response.raw.enforce_content_length = True
            yield from response.raw.stream(_BLOCK, decode_content=False)
