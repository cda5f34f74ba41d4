"""RECORD: the list of a wheel's files with their hashes and sizes (PEP 376, PEP 427)."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from installer.records import InvalidRecordEntry, parse_record_file

from vllm_stack.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Digest:
    """What RECORD knows of a file's content."""

    sha256: str
    """64 hex digits."""
    size: int
    """Bytes."""

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """Return the digest of ``data``."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    @classmethod
    def of_stream(cls, stream: BinaryIO) -> Digest:
        """Return the digest of what ``stream`` gives, read in blocks."""
        digest, size = hashlib.sha256(), 0
        while block := stream.read(_BLOCK):
            digest.update(block)
            size += len(block)
        return cls(digest.hexdigest(), size)


def parse_record(data: bytes, *, source: str) -> dict[str, Digest | None]:
    """Return the rows of a RECORD by path; None for a row without hash and size.

    Raises IntegrityError for text that is not a RECORD, a path listed twice, or a hash that is not sha256
    in the form that the wheel specification gives (URL-safe base64 without padding).
    """
    rows: dict[str, Digest | None] = {}
    try:
        # Split at line feeds alone: a path may hold any other character that str.splitlines() knows.
        for path, hashed, size in parse_record_file(io.StringIO(data.decode("utf-8"), newline="")):
            if path in rows:
                raise IntegrityError(f"{source} lists {path} twice")
            rows[path] = _digest(hashed, size) if hashed or size else None
    except (UnicodeDecodeError, csv.Error, InvalidRecordEntry, ValueError) as error:
        raise IntegrityError(f"{source} is not a valid RECORD: {error}") from error
    return rows


def _digest(hashed: str, size: str) -> Digest:
    algorithm, _, value = hashed.partition("=")
    if algorithm != "sha256":
        raise ValueError(f"expected a sha256, found {hashed!r}")
    try:
        raw = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"not URL-safe base64: {hashed!r}") from error
    if encode_hash(raw.hex()) != hashed or len(raw) != hashlib.sha256().digest_size:
        raise ValueError(f"not a sha256 in URL-safe base64 without padding: {hashed!r}")
    if not (size.isascii() and size.isdecimal()) or str(int(size)) != size:
        raise ValueError(f"not a size in bytes: {size!r}")
    return Digest(raw.hex(), int(size))


def encode_hash(sha256: str) -> str:
    """Return a sha256 (hex digits) in the form that RECORD has."""
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()


def format_record(rows: Mapping[str, Digest], own_path: str) -> bytes:
    """Return the RECORD of ``rows``, in their order, ended by the row of the RECORD itself."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(_rows(rows.items()))
    writer.writerow((own_path, "", ""))
    return text.getvalue().encode()


def _rows(items: Iterable[tuple[str, Digest]]) -> Iterable[tuple[str, str, str]]:
    for path, digest in items:
        yield path, encode_hash(digest.sha256), str(digest.size)
