"""Native files of a wheel against its tag: interpreter, ABI and processor.

A wheel that is tagged for every CPython and holds an extension module for one of them installs anywhere
and fails on import. The file's name tells what an extension module is for, its ELF header the processor.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from packaging.tags import Tag

ELF_MAGIC = b"\x7fELF"
#: How much of a file the audit of its processor needs.
HEADER_SIZE = 20
_ELFCLASS64, _LITTLE_ENDIAN = 2, 1
#: e_machine of the ELF specification, and its processor supplements.
_MACHINES = {
    62: "x86_64",
    183: "aarch64",
    3: "i686",
    40: "armv7l",
    243: "riscv64",
    21: "ppc64le",
    22: "s390x",
}
_OTHER_FORMATS = {
    b"MZ": "a Windows file",
    b"\xcf\xfa\xed\xfe": "a macOS file",
    b"\xca\xfe\xba\xbe": "a macOS file",
}
_CPYTHON = re.compile(r"\.cpython-(\d+)([a-z]*)-([a-z0-9_]+)-[a-z0-9-]+\.so$")
_WINDOWS = re.compile(r"\.(pyd|dll)$")


def is_library_name(name: str) -> bool:
    """Say whether a file of this name is loaded by the interpreter or the dynamic linker."""
    return bool(re.search(r"\.(so(\.\d+)*|pyd|dll|dylib)$", name))


def is_native(head: bytes) -> bool:
    """Say whether a file that begins with ``head`` is machine code."""
    return head.startswith((ELF_MAGIC, *_OTHER_FORMATS))


def audit_native(name: str, head: bytes, tags: Iterable[Tag], chunks: Iterable[bytes] = ()) -> Iterator[str]:
    """Yield what is wrong with the native file ``name`` in a wheel with ``tags``.

    ``head`` are its first HEADER_SIZE bytes; ``chunks`` its whole content, which is read only for a
    module whose name does not tell the ABI.
    """
    known = list(tags)
    yield from _audit_processor(name, head, known)
    if not name.endswith(".so"):
        if _WINDOWS.search(name):
            yield "a Windows library in a wheel for Linux"
        return
    match = _CPYTHON.search(name)
    if match:
        python = f"cp{match[1]}{match[2]}"
        if any((tag.interpreter, tag.abi) != (f"cp{match[1]}", python) for tag in known):
            yield f"an extension module for {python} alone, in a wheel tagged {_shown(known)}"
    elif name.endswith(".abi3.so"):
        if any(tag.abi != "abi3" and not re.fullmatch(r"cp3\d+", tag.abi) for tag in known):
            yield f"an extension module for the stable ABI, in a wheel tagged {_shown(known)}"
    elif _defines_module(name, chunks):
        yield f"an extension module whose name does not tell its ABI, in a wheel tagged {_shown(known)}"


def _shown(tags: list[Tag]) -> str:
    return ", ".join(sorted(map(str, tags)))


def _audit_processor(name: str, head: bytes, tags: list[Tag]) -> Iterator[str]:
    if not head.startswith(ELF_MAGIC):
        foreign = next((text for magic, text in _OTHER_FORMATS.items() if head.startswith(magic)), None)
        if foreign or is_library_name(name):
            yield f"{foreign or 'not a native library at all'}, in a wheel tagged {_shown(tags)}"
        return
    if len(head) < HEADER_SIZE:
        yield "its ELF header is cut off"
        return
    width, order = head[4], head[5]
    (machine,) = struct.unpack_from("<H" if order == _LITTLE_ENDIAN else ">H", head, 18)
    processor = _MACHINES.get(machine, f"ELF machine {machine}")
    if width != _ELFCLASS64 or any(not tag.platform.endswith(f"_{processor}") for tag in tags):
        yield f"built for {processor} ({width * 32} bit), in a wheel tagged {_shown(tags)}"


def _defines_module(name: str, chunks: Iterable[bytes]) -> bool:
    """Say whether a library has the entry point of an extension module of its name."""
    symbol = b"\0PyInit_" + name.rsplit("/", 1)[-1].removesuffix(".so").encode() + b"\0"
    kept = b""
    for chunk in chunks:
        window = kept + chunk
        if symbol in window:
            return True
        kept = window[-len(symbol) :]
    return False
