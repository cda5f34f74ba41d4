"""Writing a wheel out of members of another wheel, copied as they are, and a few new files.

Copied members keep their compressed bytes: packing them again takes half a minute for vLLM and gives
other bytes with every zlib. New members are stored without compression for the same reason; for vLLM that is
about 2 MB more in 336 MB.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from vllm_stack.atomic import atomic_file
from vllm_stack.errors import BuildError, IntegrityError
from vllm_stack.record import Digest, format_record
from vllm_stack.wheelzip import (
    CENTRAL,
    CENTRAL_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR64,
    LOCATOR64_MAGIC,
    MAX16,
    MAX32,
    UTF8_FLAG,
    ZIP64_EXTRA,
    Member,
    WheelArchive,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: 1980-01-01 00:00:00, the first moment that the zip format knows.
ZIP_EPOCH = (0 << 9 | 1 << 5 | 1) << 16
_UNIX = 3
_VERSION, _VERSION_ZIP64 = 20, 45


@dataclass(frozen=True)
class Limits:
    """The largest values of the original zip format; tests lower them to get zip64 records."""

    size: int = MAX32 - 1
    count: int = MAX16 - 1


class WheelWriter:
    """Collects a wheel's files; :func:`create_wheel` makes one and completes it."""

    def __init__(self, file: BinaryIO, dist_info: str, limits: Limits) -> None:
        self._file = file
        self._dist_info = dist_info
        self._limits = limits
        self._digest = hashlib.sha256()
        self._position = 0
        self._directory: list[bytes] = []
        self._rows: dict[str, Digest] = {}

    @property
    def sha256(self) -> str:
        """Hash of all bytes written so far."""
        return self._digest.hexdigest()

    @property
    def size(self) -> int:
        """Number of bytes written so far."""
        return self._position

    def copy(self, source: WheelArchive, name: str, digest: Digest, *, new_name: str | None = None) -> None:
        """Copy a member of ``source`` without unpacking it; ``digest`` is what its RECORD says."""
        member = source.member(name)
        self._begin(replace(member, name=new_name or name), digest)
        for block in source.raw(member):
            self._write(block)

    def add(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """Add a file, stored, with the zip format's first date."""
        self._begin(self._new_member(name, data, executable=executable), Digest.of(data))
        self._write(data)

    @staticmethod
    def _new_member(name: str, data: bytes, *, executable: bool) -> Member:
        return Member(
            name=name,
            method=zipfile.ZIP_STORED,
            flags=0,
            time=ZIP_EPOCH,
            crc=zlib.crc32(data),
            compressed_size=len(data),
            size=len(data),
            executable=executable,
            data_offset=0,
        )

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._position += len(data)

    def _begin(self, member: Member, digest: Digest) -> None:
        """Write a member's header and note its entry of the directory."""
        if member.name in self._rows:
            raise BuildError(f"{member.name} would be twice in the wheel")
        if member.size != digest.size:
            raise IntegrityError(f"{member.name} has {member.size} bytes, RECORD says {digest.size}")
        self._rows[member.name] = digest
        self._put_header(member)

    def _put_header(self, member: Member) -> None:
        name = member.name.encode()
        flags = member.flags & ~UTF8_FLAG | (0 if name.isascii() else UTF8_FLAG)
        large = max(member.size, member.compressed_size) > self._limits.size
        far = self._position > self._limits.size
        sizes = (member.compressed_size, member.size)
        shown = (MAX32, MAX32) if large else sizes
        version = _VERSION_ZIP64 if large or far else _VERSION
        common = (version, flags, member.method, member.time & 0xFFFF, member.time >> 16, member.crc, *shown)
        wide = [member.size, member.compressed_size] if large else []
        extra = _zip64_extra([*wide, self._position] if far else wide)
        mode = 0o100755 if member.executable else 0o100644
        offset = MAX32 if far else self._position
        made_by = _UNIX << 8 | _VERSION
        entry = (CENTRAL_MAGIC, made_by, *common, len(name), len(extra), 0, 0, 0, mode << 16, offset)
        self._directory.append(CENTRAL.pack(*entry) + name + extra)
        local_extra = _zip64_extra(wide)
        self._write(LOCAL.pack(LOCAL_MAGIC, *common, len(name), len(local_extra)) + name + local_extra)

    def finish(self) -> None:
        """Write RECORD and the directory. BuildError when the wheel would not be a valid one."""
        for needed in ("METADATA", "WHEEL"):
            if f"{self._dist_info}/{needed}" not in self._rows:
                raise BuildError(f"the wheel has no {self._dist_info}/{needed}")
        own_path = f"{self._dist_info}/RECORD"
        if own_path in self._rows:
            raise BuildError("RECORD is written by the writer alone")
        data = format_record(self._rows, own_path)
        self._put_header(self._new_member(own_path, data, executable=False))
        self._write(data)
        start = self._position
        self._write(b"".join(self._directory))
        self._write(self._end(start, self._position - start))

    def _end(self, start: int, size: int) -> bytes:
        count = len(self._directory)
        if count <= self._limits.count and max(start, size) <= self._limits.size:
            return END.pack(END_MAGIC, 0, 0, count, count, size, start, 0)
        version = _VERSION_ZIP64
        fields = (version, version, 0, 0, count, count, size, start)
        large = END64.pack(END64_MAGIC, END64.size - 12, *fields)
        locator = LOCATOR64.pack(LOCATOR64_MAGIC, 0, start + size, 1)
        return large + locator + END.pack(END_MAGIC, 0, 0, MAX16, MAX16, MAX32, MAX32, 0)


def _zip64_extra(values: list[int]) -> bytes:
    if not values:
        return b""
    return struct.pack(f"<2H{len(values)}Q", ZIP64_EXTRA, 8 * len(values), *values)


@contextmanager
def create_wheel(path: Path, *, limits: Limits | None = None) -> Iterator[WheelWriter]:
    """Open a wheel for writing that appears at ``path`` when the block ends, whole and valid, or not at all.

    The block adds everything but RECORD. Raises BuildError when the files are not a wheel, or when it
    cannot be written (no space left, folder not writable); nothing is left behind then.
    """
    dist_info = dist_info_of(path.name)
    try:
        with atomic_file(path) as file:
            writer = WheelWriter(file, dist_info, limits or Limits())
            yield writer
            writer.finish()
            file.flush()
            _check_result(file, path.name)
    except OSError as error:
        raise BuildError(
            f"cannot write {path}: {error.strerror or error}",
            hint="name a folder with enough space that you may write to, with --output",
        ) from error


def _check_result(file: BinaryIO, name: str) -> None:
    """Read the directory of what was written, before it gets its name."""
    try:
        WheelArchive(file, name)
    except IntegrityError as error:
        raise BuildError(f"the wheel came out damaged: {error.message}") from error


def dist_info_of(filename: str) -> str:
    """Return the name of the dist-info folder that belongs to a wheel's file name.

    BuildError when it is not a valid name for a wheel.
    """
    try:
        parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise BuildError(str(error)) from error
    name, version, _ = filename.split("-", 2)
    return f"{name}-{version}.dist-info"
