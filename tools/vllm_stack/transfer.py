"""One transfer: bytes from a place into a part file, resumed where it broke off."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm_stack.atomic import sync_directory
from vllm_stack.connection import TRANSFER_ERRORS, explain
from vllm_stack.errors import UsageError
from vllm_stack.index import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import requests

    from vllm_stack.connection import IndexSession

_BLOCK = 1 << 18


class SourceError(Exception):
    """The place cannot give the file, and asking again would not help."""


class BrokenTransferError(Exception):
    """The bytes stopped coming: another try may go on from here."""


class RangeRefusedError(BrokenTransferError):
    """The place does not continue where the bytes stopped: the next try asks for the whole file."""


class WrongBytesError(Exception):
    """The place gives something else than the pinned file."""


@dataclass(frozen=True)
class Body:
    """The bytes that a place sends."""

    #: Offset of the first byte in the file.
    start: int
    chunks: Iterator[bytes]
    #: For ``If-Range``: what names this very content on its server.
    validator: str | None = None
    #: Whether a normal end of ``chunks`` proves that nothing is missing.
    framed: bool = True


class PartFile:
    """A file that is being fetched. It belongs to the process that holds the lock on it.

    The lock is on the part file itself, so that nothing else is left in the cache, and it ends with the
    process: what a killed process had received is taken over by the next one.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self.position = 0
        while block := os.pread(descriptor, _BLOCK, self.position):
            self._count(block)
        #: Whether the bytes come from more than one answer, which might not belong together.
        self.mixed = self.position > 0

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self.position += len(data)

    @property
    def sha256(self) -> str:
        """The hash of the bytes so far."""
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Drop the bytes so far."""
        with _writing(self.path):
            os.ftruncate(self._descriptor, 0)
        self._hash = hashlib.sha256()
        self.position = 0
        self.mixed = False

    def write(self, data: bytes) -> None:
        """Append ``data``. UsageError when the cache cannot take it."""
        rest = memoryview(data)
        with _writing(self.path):
            while rest:
                # At the position that was counted: a write that failed half-way leaves bytes behind it.
                offset = self.position + len(data) - len(rest)
                rest = rest[os.pwrite(self._descriptor, rest, offset) :]
        self._count(data)

    def commit(self, final: Path) -> None:
        """Make the part the file ``final``, durably."""
        with _writing(self.path):
            os.fsync(self._descriptor)
            self.path.replace(final)
            sync_directory(final.parent)


@contextmanager
def claim(final: Path, *, waiting: Callable[[], None]) -> Iterator[PartFile]:
    """Hold the part file of ``final``; ``waiting`` is called when another process has it.

    When the block ends, the part is gone: committed or removed. Only an interrupt leaves the bytes there
    for the next run. UsageError when the folder cannot be written.
    """
    path = final.with_name(f".{final.name}.part")
    with _writing(path):
        descriptor = _lock(path, waiting)
    try:
        try:
            yield PartFile(path, descriptor)
        except KeyboardInterrupt:
            if os.fstat(descriptor).st_size == 0:
                _remove(path, descriptor)
            raise
        except BaseException:
            _remove(path, descriptor)
            raise
        _remove(path, descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path, waiting: Callable[[], None]) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # whoever failed just now removed the empty folder
        try:
            _flock(descriptor, waiting)
        except BaseException:
            os.close(descriptor)
            raise
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its holder committed or removed it


def _flock(descriptor: int, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove(path: Path, descriptor: int) -> None:
    """Remove the part, unless it was committed, and its folder when that is empty then."""
    if _is_at(descriptor, path):
        path.unlink()
    with suppress(OSError):  # not empty, or removed by another process
        path.parent.rmdir()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to the cache: {error.strerror or error}: {path.parent}",
            hint="make room, or name another folder with --cache-dir or VLLM_STACK_CACHE",
        ) from error


@dataclass
class Transfer:
    """The transfer of one file from one place."""

    session: IndexSession
    url: str
    #: Bytes of the pinned file.
    size: int
    timeout: float
    advance: Callable[[int], None]
    validator: str | None = None
    #: Cleared when the place answered a request for the rest with something that does not fit.
    ranges: bool = True

    def receive(self, part: PartFile) -> None:
        """Append what the place sends to ``part`` until it has ``size`` bytes.

        Raises BrokenTransferError when it may be called again, SourceError or WrongBytesError when not.
        """
        if part.position > (self.size if self.ranges else 0):
            part.restart()
        if part.position == self.size:
            return
        with self._open(part.position) as body:
            if body.start != part.position:
                part.restart()
            part.mixed = part.position > 0
            self.validator = body.validator
            self._append(part, body.chunks)
            if part.position < self.size:
                missing = f"ended after {part.position} of {self.size} bytes"
                raise WrongBytesError(missing) if body.framed else BrokenTransferError(missing)

    def _append(self, part: PartFile, chunks: Iterator[bytes]) -> None:
        for chunk in chunks:
            if part.position + len(chunk) > self.size:
                raise WrongBytesError(f"sends more than the pinned {self.size} bytes")
            part.write(chunk)
            self.advance(part.position)

    @contextmanager
    def _open(self, position: int) -> Iterator[Body]:
        if urlsplit(self.url).scheme == "file":
            with self._open_local(position) as body:
                yield body
            return
        try:
            response = self.session.get(
                self.url, headers=self._headers(position), stream=True, timeout=self.timeout
            )
        except TRANSFER_ERRORS as error:
            raise SourceError(explain(error)) from error
        with response:
            yield self._body(response, position)

    @contextmanager
    def _open_local(self, position: int) -> Iterator[Body]:
        try:
            file = local_path(self.url).open("rb")
        except OSError as error:
            raise SourceError(explain(error)) from error
        with file:
            self._check_length(os.fstat(file.fileno()).st_size, "")
            file.seek(position)
            yield Body(position, _reading(iter(lambda: file.read(_BLOCK), b"")))

    def _headers(self, position: int) -> dict[str, str]:
        # The hash is that of the file as it lies in the index, never of a decoded one.
        headers = {"Accept-Encoding": "identity"}
        if position:
            headers["Range"] = f"bytes={position}-"
            if self.validator:
                headers["If-Range"] = self.validator
        return headers

    def _body(self, response: requests.Response, position: int) -> Body:
        chunks = _reading(response.raw.stream(_BLOCK, decode_content=False))
        if response.status_code == HTTPStatus.OK:
            length = response.headers.get("Content-Length", "")
            if length.isdecimal():
                self._check_length(int(length), response.headers.get("Content-Type", ""))
            framed = bool(length) or "chunked" in response.headers.get("Transfer-Encoding", "").lower()
            return Body(0, chunks, _validator(response), framed)
        if response.status_code == HTTPStatus.PARTIAL_CONTENT and self._continues(response, position):
            return Body(position, chunks, _validator(response), framed=False)
        if response.status_code in (HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            if position == 0:
                raise SourceError(f"HTTP {response.status_code} to a request for the whole file")
            self.ranges = False
            raise RangeRefusedError("what was sent for the rest does not fit")
        raise SourceError(f"HTTP {response.status_code} {response.reason}")

    def _continues(self, response: requests.Response, position: int) -> bool:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        return match is not None and int(match[1]) == position and match[2] in (str(self.size), "*")

    def _check_length(self, length: int, content_type: str) -> None:
        if length != self.size:
            kind = f" of {content_type}" if content_type else ""
            raise WrongBytesError(f"has {length} bytes{kind}, the pinned file {self.size}")


def _reading(chunks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from chunks
    except TRANSFER_ERRORS as error:
        raise BrokenTransferError(explain(error)) from error


def _validator(response: requests.Response) -> str | None:
    """Return what If-Range may carry: a strong entity tag, else the time of the last change."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")
