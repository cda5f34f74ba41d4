"""The files in which a wheel states its name, version and tags: reading and rewriting them.

Everything that is not named here stays byte for byte as upstream wrote it.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from email.parser import BytesParser
from typing import TYPE_CHECKING

from packaging.tags import Tag, parse_tag

from vllm_stack import __version__
from vllm_stack.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packaging.version import Version

_VERSION_NAMES = frozenset({"__version__", "version"})
_COMMIT_NAMES = ("__commit_id__", "commit_id")
_TUPLE_NAMES = frozenset({"__version_tuple__", "version_tuple"})
#: Who wrote the file, in METADATA's and WHEEL's own words.
GENERATOR = f"vllm-blackwell-stack ({__version__})"


def header_values(data: bytes, key: str) -> list[str]:
    """Return the values of a header of METADATA or WHEEL."""
    return [str(value).strip() for value in BytesParser().parsebytes(data, headersonly=True).get_all(key, [])]


def header_value(data: bytes, key: str, *, source: str) -> str:
    """Return the only value of a header. IntegrityError when there is none or more than one."""
    values = header_values(data, key)
    if len(values) != 1:
        raise IntegrityError(f"{source} has {len(values)} values for {key}, expected one")
    return values[0]


def _split_header(data: bytes) -> tuple[bytes, bytes]:
    """Return the header of a file in mail form, with its last newline, and what follows the empty line."""
    head, separator, body = data.partition(b"\n\n")
    return head.rstrip(b"\n") + b"\n", body if separator else b""


def rewrite_metadata(data: bytes, version: Version, notice: str, license_file: str) -> bytes:
    """Return METADATA with another version, ``notice`` before the description, and one more licence file.

    ``license_file`` is relative to ``licenses/``. IntegrityError when there is not exactly one version.
    """
    header_value(data, "Version", source="METADATA")
    head, body = _split_header(data)
    head = re.sub(rb"(?mi)^Version:.*$", b"Version: " + str(version).encode(), head)
    if license_file not in header_values(data, "License-File"):
        head += f"License-File: {license_file}\n".encode()
    return head + b"\n" + notice.encode() + b"\n" + body


def rewrite_wheel(data: bytes, python: str, abi: str, platform: str) -> bytes:
    """Return WHEEL with the tags of the file name's three parts, and us as its generator.

    The official file of vllm says linux_x86_64 where its name says manylinux_2_28_x86_64.
    """
    purelib = header_value(data, "Root-Is-Purelib", source="WHEEL")
    tags = [
        f"Tag: {one}-{two}-{three}"
        for one in python.split(".")
        for two in abi.split(".")
        for three in platform.split(".")
    ]
    lines = ["Wheel-Version: 1.0", f"Generator: {GENERATOR}", f"Root-Is-Purelib: {purelib}", *tags]
    return ("\n".join(lines) + "\n").encode()


def wheel_tags(data: bytes) -> frozenset[Tag]:
    """Return the tags that a WHEEL file states. IntegrityError for one that is no tag."""
    found: set[Tag] = set()
    for value in header_values(data, "Tag"):
        try:
            found |= parse_tag(value)
        except ValueError as error:
            raise IntegrityError(f"WHEEL states {value!r}, which is no tag") from error
    return frozenset(found)


@dataclass(frozen=True)
class ModuleVersion:
    """What a package's version module says; None for what it does not say."""

    versions: tuple[str, ...]
    tuples: tuple[tuple[int | str, ...], ...]


def _assignments(source: bytes) -> list[tuple[str, ast.expr]]:
    """Return (name, value) of each plain assignment on the top level."""
    tree = _parse("the version module", source)
    return [
        (target.id, node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def read_version_module(source: bytes) -> ModuleVersion:
    """Return the versions that ``_version.py`` assigns. IntegrityError when they are not literals."""
    versions: list[str] = []
    tuples: list[tuple[int | str, ...]] = []
    for name, value in _assignments(source):
        try:
            if name in _VERSION_NAMES:
                versions.append(str(ast.literal_eval(value)))
            elif name in _TUPLE_NAMES:
                tuples.append(tuple(ast.literal_eval(value)))
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"the version module's {name} is not a literal") from error
    return ModuleVersion(tuple(versions), tuple(tuples))


def read_commit(source: bytes) -> str | None:
    """Return the commit that ``_version.py`` says it was made from (7 to 40 hex digits); None without one."""
    for name, value in _assignments(source):
        if name in _COMMIT_NAMES and isinstance(value, ast.Constant) and isinstance(value.value, str):
            # setuptools-scm writes "g" before it, as `git describe` does.
            match = re.fullmatch(r"g?([0-9a-f]{7,40})", value.value)
            if match:
                return match[1]
    return None


def version_tuple(version: Version) -> tuple[int | str, ...]:
    """Return a version in the form that setuptools-scm writes: release, then the local label as one part."""
    return (*version.release, *([version.local] if version.local else []))


def rewrite_version_module(source: bytes, version: Version) -> bytes:
    """Return ``_version.py`` with another version in place of every literal that states one.

    IntegrityError when the module does not assign both ``__version__`` and ``version_tuple``.
    """
    texts = {**dict.fromkeys(_VERSION_NAMES, repr(str(version)))}
    texts |= dict.fromkeys(_TUPLE_NAMES, repr(version_tuple(version)))
    found = [(name, value) for name, value in _assignments(source) if name in texts]
    names = {name for name, _ in found}
    if not (names & _VERSION_NAMES and names & _TUPLE_NAMES):
        raise IntegrityError("the version module does not assign __version__ and version_tuple")
    lines = source.splitlines(keepends=True)
    # One literal may be assigned to two names, so that a position comes up twice; last first, so that
    # positions before it stay right.
    places = {_position(value): texts[name] for name, value in found}
    for (line, start, last, end), text in sorted(places.items(), reverse=True):
        head, tail = lines[line][:start], lines[last][end:]
        lines[line : last + 1] = [head + text.encode() + tail]
    return b"".join(lines)


def _position(node: ast.expr) -> tuple[int, int, int, int]:
    """Return first line, first byte, last line and end byte of an expression, lines from 0."""
    last, end = node.end_lineno, node.end_col_offset
    if last is None or end is None:
        raise IntegrityError("the version module has a value without a position")
    return node.lineno - 1, node.col_offset, last - 1, end


def check_python(path: str, source: bytes) -> None:
    """Raise IntegrityError when a Python file does not parse."""
    _parse(path, source)


def _parse(path: str, source: bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # Upstream's doubtful escapes are upstream's matter.
            warnings.simplefilter("ignore")
            return ast.parse(source, filename=path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise IntegrityError(f"{path} does not parse: {error}") from error


def with_change_notice(path: str, data: bytes, patches: Sequence[str], version: Version) -> bytes:
    """Return a changed file with the notice of change that section 4(b) of the licence asks for.

    It is a comment at the end of a Python file: there it cannot come before an SPDX line, a coding line, a
    docstring or a ``__future__`` import, and no line number of a traceback moves. Other formats may have
    no comments; the NOTICE file lists all changed files.
    """
    if not path.endswith((".py", ".pyi")):
        return data
    because = f" by {', '.join(patches)}" if patches else " to state its version"
    gap = b"" if not data or data.endswith((b"\n", b"\r")) else b"\n"
    text = f"# Modified for {version.base_version}+{version.local} (vLLM Blackwell stack){because}.\n"
    return data + gap + text.encode()
