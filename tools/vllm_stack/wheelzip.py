"""Reading the zip archive of a wheel, more strictly than an installer does.

zipfile parses the central directory. What it leaves unchecked is checked here, so that every byte of
the archive belongs to a member or to the directory, and both tell the same: a reader that trusts local
headers and one that trusts the directory then see the same files.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from vllm_stack.errors import IntegrityError
from vllm_stack.record import Digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCAL = struct.Struct("<4s5H3L2H")
LOCAL_MAGIC = b"PK\3\4"
CENTRAL = struct.Struct("<4s6H3L5H2L")
CENTRAL_MAGIC = b"PK\1\2"
END = struct.Struct("<4s4H2LH")
END_MAGIC = b"PK\5\6"
END64 = struct.Struct("<4sQ2H2L4Q")
END64_MAGIC = b"PK\6\6"
LOCATOR64 = struct.Struct("<4sLQL")
LOCATOR64_MAGIC = b"PK\6\7"
#: Where in an entry of the directory the lengths of its variable parts are.
_LENGTHS_OFFSET = 28
#: Id of the extra field that holds what 32 bits cannot.
ZIP64_EXTRA = 1
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF

UTF8_FLAG = 0x800
#: Besides: two bits in which deflate notes its level.
_KNOWN_FLAGS = UTF8_FLAG | 0x6
_ENCRYPTED_FLAGS = 0x1 | 0x40 | 0x2000
_DESCRIPTOR_FLAG = 0x8
_DIRECTORY = 0o040000
_REGULAR = 0o100000
_TYPE_MASK = 0o170000
_BLOCK = 1 << 18
#: More than the tables at the beginning of any deflate stream take.
_HEAD_BLOCK = 1 << 10


@dataclass(frozen=True)
class Member:
    """A file in a wheel."""

    name: str
    method: int
    flags: int
    time: int
    """Time and date of the zip format, as in the local header: date in the upper 16 bits."""
    crc: int
    compressed_size: int
    size: int
    executable: bool
    data_offset: int
    """Where its compressed bytes begin."""


class WheelArchive:
    """The members of an open wheel."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Read the directory of ``file``; ``name`` stands in errors.

        IntegrityError for whatever is wrong with the archive's structure.
        """
        self._file = file
        self.name = name
        self.members: dict[str, Member] = {}
        self._read()

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[WheelArchive]:
        """Open the wheel at ``path``. IntegrityError when it cannot be read."""
        try:
            file = path.open("rb")
        except OSError as error:
            raise IntegrityError(f"cannot read {path}: {error.strerror}") from error
        with file:
            yield cls(file, path.name)

    def _fault(self, message: str) -> IntegrityError:
        return IntegrityError(f"{self.name}: {message}")

    def _read(self) -> None:
        start, count = _find_directory(self._file, self.name)
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
        except _ZIP_ERRORS as error:
            raise self._fault(f"the directory of the archive is damaged: {error}") from error
        if len(infos) != count:
            raise self._fault(f"the directory has {len(infos)} members, its end says {count}")
        position, seen = 0, set[str]()
        for info in infos:
            if info.orig_filename in seen:
                raise self._fault(f"{info.orig_filename}: there are two members of this name")
            seen.add(info.orig_filename)
            position = self._read_member(info, position)
        if position != start:
            raise self._fault(f"{start - position} bytes between the last member and the directory")

    def _read_member(self, info: zipfile.ZipInfo, position: int) -> int:
        """Check a member, add it, and return where the next one has to begin."""
        name = info.orig_filename
        problem = _name_problem(name) or _directory_problem(info)
        if problem:
            raise self._fault(f"{name!r}: {problem}")
        if info.header_offset != position:
            raise self._fault(f"{name}: its header is at byte {info.header_offset}, not at {position}")
        data_offset, time = self._check_local_header(info)
        if not info.is_dir():
            self.members[name] = Member(
                name=name,
                method=info.compress_type,
                flags=info.flag_bits,
                time=time,
                crc=info.CRC,
                compressed_size=info.compress_size,
                size=info.file_size,
                executable=bool(info.external_attr >> 16 & 0o111),
                data_offset=data_offset,
            )
        return data_offset + info.compress_size

    def _check_local_header(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """Compare the local header with the directory; return where the data begins, and its time."""
        self._file.seek(info.header_offset)
        raw = self._file.read(LOCAL.size)
        if len(raw) < LOCAL.size:
            raise self._fault(f"{info.orig_filename}: the archive ends in its header")
        magic, version, flags, method, time, date, crc, packed, size, name_size, extra_size = LOCAL.unpack(
            raw
        )
        if magic != LOCAL_MAGIC:
            raise self._fault(f"{info.orig_filename}: there is no header at byte {info.header_offset}")
        name, extra = self._file.read(name_size), self._file.read(extra_size)
        packed, size = _local_sizes(packed, size, extra)
        local = (version, flags, method, _time(time, date), crc, packed, size, name)
        encoded = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8_FLAG else "cp437")
        central = (
            info.extract_version,
            info.flag_bits,
            info.compress_type,
            _pack_time(info.date_time),
            info.CRC,
            info.compress_size,
            info.file_size,
            encoded,
        )
        if local != central:
            fields = ("version", "flags", "method", "time", "crc", "compressed size", "size", "name")
            wrong = ", ".join(field for field, a, b in zip(fields, local, central, strict=True) if a != b)
            raise self._fault(f"{info.orig_filename}: header and directory differ in {wrong}")
        return info.header_offset + LOCAL.size + name_size + extra_size, _time(time, date)

    def member(self, name: str) -> Member:
        """Return the member called ``name``. IntegrityError when there is none."""
        try:
            return self.members[name]
        except KeyError:
            raise self._fault(f"{name} is missing") from None

    def raw(self, member: Member) -> Iterator[bytes]:
        """Yield the compressed bytes of ``member``, unchanged, in blocks."""
        position, left = member.data_offset, member.compressed_size
        while left:
            self._file.seek(position)
            block = self._file.read(min(_BLOCK, left))
            if not block:
                raise self._fault(f"{member.name}: the archive ends in its data")
            position += len(block)
            left -= len(block)
            yield block

    def content(self, member: Member) -> Iterator[bytes]:
        """Yield the bytes of ``member`` in blocks.

        IntegrityError when its data is damaged; known only after the last block.
        """
        crc, size = 0, 0
        for block in self._inflate(member) if member.method == zipfile.ZIP_DEFLATED else self.raw(member):
            crc = zlib.crc32(block, crc)
            size += len(block)
            if size > member.size:
                break
            yield block
        if (crc, size) != (member.crc, member.size):
            raise self._fault(f"{member.name}: its data is damaged (size or crc)")

    def _inflate(self, member: Member) -> Iterator[bytes]:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            for block in self.raw(member):
                pending = block
                while pending and not inflater.eof:
                    # Bounded, so that a few bytes cannot ask for gigabytes of memory.
                    yield inflater.decompress(pending, 4 * _BLOCK)
                    pending = inflater.unconsumed_tail
            yield inflater.flush()
        except zlib.error as error:
            raise self._fault(f"{member.name}: its data is damaged: {error}") from error
        if not inflater.eof or inflater.unused_data:
            raise self._fault(f"{member.name}: its compressed data does not end where the header says")

    def read(self, name: str) -> bytes:
        """Return the content of the member called ``name``. IntegrityError when damaged or missing."""
        return b"".join(self.content(self.member(name)))

    def head(self, name: str, size: int) -> bytes:
        """Return the first ``size`` bytes of the member called ``name``, unpacking no more than these.

        Its data is not checked as a whole.
        """
        member = self.member(name)
        raw = _read_at(self._file, member.data_offset, min(member.compressed_size, _HEAD_BLOCK + size))
        if member.method == zipfile.ZIP_STORED:
            return raw[:size]
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, size)
        except zlib.error as error:
            raise self._fault(f"{name}: its data is damaged: {error}") from error

    def digest(self, name: str) -> Digest:
        """Return hash and size of the member called ``name``. IntegrityError when it is damaged."""
        stream = io.BufferedReader(_BlockStream(self.content(self.member(name))), _BLOCK)
        return Digest.of_stream(stream)


class _BlockStream(io.RawIOBase):
    """A readable stream over blocks of bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._pending:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._pending = memoryview(block)
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count


#: What zipfile raises for damaged input, besides its own class.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    struct.error,
    NotImplementedError,
    ValueError,
    EOFError,
    OverflowError,
    OSError,
)


def _time(time: int, date: int) -> int:
    return date << 16 | time


def _pack_time(moment: tuple[int, int, int, int, int, int]) -> int:
    year, month, day, hour, minute, second = moment
    return _time(hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day)


def _name_problem(name: str) -> str | None:
    """Say why ``name`` must not be unpacked, or None."""
    parts = name.removesuffix("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "the name is not a plain relative path"
    if "\\" in name or ":" in parts[0] or not name.isprintable():
        return "the name holds a character that a path must not have"
    return None


def _directory_problem(info: zipfile.ZipInfo) -> str | None:
    """Say what in a directory entry no wheel should have, or None."""
    kind = info.external_attr >> 16 & _TYPE_MASK
    allowed = _DIRECTORY if info.is_dir() else _REGULAR
    checks = (
        (info.flag_bits & _ENCRYPTED_FLAGS, "it is encrypted"),
        (info.flag_bits & _DESCRIPTOR_FLAG, "its sizes follow its data (data descriptor)"),
        (info.flag_bits & ~_KNOWN_FLAGS, f"it has unknown flags ({info.flag_bits:#x})"),
        (info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), "unknown compression"),
        (kind not in (0, allowed), f"it is not a plain file (mode {info.external_attr >> 16:o})"),
        (info.is_dir() and info.file_size, "it is a folder with content"),
        (info.volume or info.comment or info.reserved, "it has a comment, or fields that must be 0"),
        (
            info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size,
            "it is not compressed and has two sizes",
        ),
    )
    return next((problem for wrong, problem in checks if wrong), None)


def _local_sizes(packed: int, size: int, extra: bytes) -> tuple[int, int]:
    """Return compressed and real size of a local header, from its zip64 field where it has one."""
    if MAX32 not in (packed, size):
        return packed, size
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == ZIP64_EXTRA and length >= 16 and position + 20 <= len(extra):  # noqa: PLR2004 - two 64-bit sizes
            large, large_packed = struct.unpack_from("<2Q", extra, position + 4)
            return (large_packed if packed == MAX32 else packed), (large if size == MAX32 else size)
        position += 4 + length
    return packed, size


def _find_directory(file: BinaryIO, name: str) -> tuple[int, int]:
    """Return where the directory begins and how many members it has.

    IntegrityError unless the archive ends with the record of the directory's end, without a comment,
    and nothing lies between the directory and its end.
    """
    file_size = file.seek(0, io.SEEK_END)
    raw = _read_at(file, file_size - END.size, END.size)
    if len(raw) < END.size or not raw.startswith(END_MAGIC):
        raise IntegrityError(f"{name}: not a whole zip archive: its end is missing")
    _, disk, first_disk, here, count, size, start, comment = END.unpack(raw)
    end = file_size - END.size
    if _read_at(file, end - LOCATOR64.size, 4) == LOCATOR64_MAGIC:
        small = (disk, first_disk, here, count, size, start)
        large, end = _find_directory64(file, end, name)
        if any(a not in (b, MAX16, MAX32) for a, b in zip(small, large, strict=True)):
            raise IntegrityError(f"{name}: the two ends of the archive differ")
        disk, first_disk, here, count, size, start = large
    if disk or first_disk or here != count or comment or start + size != end:
        raise IntegrityError(f"{name}: the end of the archive contradicts itself")
    if not _adds_up(_read_at(file, start, size)):
        raise IntegrityError(f"{name}: the directory of the archive is not as long as its entries")
    return start, count


def _adds_up(directory: bytes) -> bool:
    """Say whether the entries' lengths fill the directory: zipfile takes a last name that is cut off."""
    position = 0
    while position + CENTRAL.size <= len(directory):
        name_size, extra_size, comment_size = struct.unpack_from("<3H", directory, position + _LENGTHS_OFFSET)
        position += CENTRAL.size + name_size + extra_size + comment_size
    return position == len(directory)


def _find_directory64(file: BinaryIO, end: int, name: str) -> tuple[tuple[int, ...], int]:
    """Return the fields of the zip64 end record, and where it begins."""
    locator = _read_at(file, end - LOCATOR64.size, LOCATOR64.size)
    _, disk, position, disks = LOCATOR64.unpack(locator)
    raw = _read_at(file, position, END64.size)
    if disk or disks != 1 or position + END64.size + LOCATOR64.size != end or not raw.startswith(END64_MAGIC):
        raise IntegrityError(f"{name}: the zip64 end of the archive contradicts itself")
    _, length, _, _, *fields = END64.unpack(raw)
    if length != END64.size - 12:
        raise IntegrityError(f"{name}: the zip64 end of the archive has a wrong length")
    return tuple(fields), position


def _read_at(file: BinaryIO, position: int, size: int) -> bytes:
    file.seek(max(position, 0))
    return file.read(size)
