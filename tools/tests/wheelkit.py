"""Small official-like wheels and source archives, and the plans of overlays on them."""

from __future__ import annotations

import base64
import hashlib
import platform
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version
from stackproject import make_sdist

from vllm_stack.hashing import sha256_bytes
from vllm_stack.overlay import FileChange, OverlayPlan, OverlayResult, build_overlay
from vllm_stack.patch import Patch
from vllm_stack.pins import Pin, parse_pin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: The tests install wheels, so that these are for this machine.
ARCH = platform.machine()
MACHINES = {"x86_64": 62, "aarch64": 183}
TAG = f"cp38-abi3-manylinux_2_28_{ARCH}"
MOMENT = (2026, 11, 1, 9, 43, 4)
STACK_ID = "ab12cd34" * 8
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: Copyright contributors to the project\n"
)
VERSION_MODULE = (
    "from __future__ import annotations\n\n"
    "version: str\n__version__: str\n\n"
    "__version__ = version = '1.0.0'\n__version_tuple__ = version_tuple = (1, 0, 0)\n\n"
    "__commit_id__ = commit_id = 'g0123abc'\n"
)


def elf(machine: str = ARCH, *, size: int = 4096, symbol: bytes = b"") -> bytes:
    """Return a file with the header of a 64-bit little-endian ELF library, and a symbol's name in it."""
    head = struct.pack("<4s5B7x2H", b"\x7fELF", 2, 1, 1, 0, 0, 3, MACHINES.get(machine, 3))
    return head + b"\0" + symbol + b"\0" + bytes(size)


#: Files of the package that upstream's repository has.
SOURCES: dict[str, bytes] = {
    "demo/__init__.py": f'{SPDX}"""Demo."""\n\nfrom ._version import __version__ as __version__\n'.encode(),
    "demo/core.py": f"{SPDX}from __future__ import annotations\n\nVALUE = 1\n".encode(),
    "demo/no_newline.py": b"LAST = 1",
    "demo/crlf.py": b"A = 1\r\nB = 2\r\n",
    "demo/old.py": b"OLD = True\n",
    "demo/data/config.json": b'{"a": 1}\n',
    "demo/_custom_ops.py": b"import demo\n",
    "demo/sub/ünïcode.py": "NAME = 'ü'\n".encode(),
}
#: Files that only the build makes.
BUILT: dict[str, bytes] = {
    "demo/_C.abi3.so": elf(size=200_000),
    "demo/vendored.py": b"VENDORED = 1\n",
    "demo/_version.py": VERSION_MODULE.encode(),
}
METADATA = (
    "Metadata-Version: 2.4\nName: demo\nVersion: 1.0.0\nSummary: A demo\nLicense-Expression: Apache-2.0\n"
    "Requires-Python: >=3.10\nDescription-Content-Type: text/markdown\nLicense-File: LICENSE\n\n"
    "# Demo\n\nVersion: 1.0.0 is not a header here.\n"
)
INFO: dict[str, bytes] = {
    "licenses/LICENSE": b"Apache License 2.0\n",
    "METADATA": METADATA.encode(),
    "WHEEL": (
        "Wheel-Version: 1.0\nGenerator: setuptools (80.1)\nRoot-Is-Purelib: false\n"
        f"Tag: cp38-abi3-linux_{ARCH}\n\n"
    ).encode(),
    "entry_points.txt": b"[console_scripts]\ndemo-version = demo:__version__.upper\n",
    "top_level.txt": b"demo\n",
}


def record_row(path: str, data: bytes) -> str:
    """Return a row of RECORD, made without the code under test."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(data)}\n"


def make_wheel(
    path: Path,
    package: Mapping[str, bytes],
    info: Mapping[str, bytes] = INFO,
    *,
    dist_info: str = "demo-1.0.0.dist-info",
    record: bytes | None = None,
) -> Path:
    """Write a wheel as setuptools does: deflated, RECORD last; ``record`` replaces the right RECORD."""
    files = {**package, **{f"{dist_info}/{name}": data for name, data in info.items()}}
    rows = "".join(record_row(name, data) for name, data in files.items()) + f"{dist_info}/RECORD,,\n"
    files[f"{dist_info}/RECORD"] = rows.encode() if record is None else record
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name, MOMENT)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (0o100755 if name.endswith((".so", ".sh")) else 0o100664) << 16
            archive.writestr(member, data)
    return path


def rezip(path: Path, change: Mapping[str, bytes | None], *, fix_record: bool = False) -> None:
    """Replace, add or (None) remove members of a wheel; RECORD is made anew when ``fix_record`` is set."""
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: (item, archive.read(item)) for item in archive.infolist()}
    for name, data in change.items():
        if data is None:
            del members[name]
        else:
            members[name] = (zipfile.ZipInfo(name, MOMENT), data)
    own = next(name for name in members if name.endswith(".dist-info/RECORD"))
    if fix_record:
        rows = "".join(record_row(name, data) for name, (_, data) in members.items() if name != own)
        members[own] = (members[own][0], f"{rows}{own},,\n".encode())
    with zipfile.ZipFile(path, "w") as archive:
        for item, data in members.values():
            fresh = zipfile.ZipInfo(item.filename, item.date_time)
            fresh.compress_type, fresh.external_attr = (
                item.compress_type,
                item.external_attr or 0o100644 << 16,
            )
            archive.writestr(fresh, data)


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return all members by zipfile's own reading."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def make_patch(name: str = "0100-demo-change.patch", subject: str = "[Demo] Change it") -> Patch:
    """Return a patch file; an overlay reads no more of it than name, subject and bytes."""
    return Patch(
        name, f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nSubject: {subject}\n\nWhy: ü\n---\n".encode()
    )


def change(path: str, data: bytes | None, *, added: bool = False) -> FileChange:
    """Return the change of a file by the one patch of the plans here."""
    return FileChange(path, data, ("0100-demo-change.patch",), added=added)


CHANGES = (
    change("demo/core.py", SOURCES["demo/core.py"].replace(b"1\n", b"2\n")),
    change("demo/no_newline.py", b"LAST = 2"),
    change("demo/crlf.py", b"A = 1\r\nB = 3\r\n"),
    change("demo/data/config.json", b'{"a": 2}\n'),
    change("demo/new.py", b"NEW = True\n", added=True),
    change("demo/old.py", None),
)


@dataclass
class Kit:
    """A pinned official wheel and source archive in a folder."""

    folder: Path
    package: Mapping[str, bytes]
    sources: Mapping[str, bytes]
    info: Mapping[str, bytes]
    tag: str = TAG
    record: bytes | None = None

    @classmethod
    def make(
        cls,
        folder: Path,
        *,
        built: Mapping[str, bytes] | None = None,
        sources: Mapping[str, bytes] | None = None,
        info: Mapping[str, bytes] | None = None,
        tag: str = TAG,
        record: bytes | None = None,
    ) -> Kit:
        """Write both archives; ``sources`` stand in the source archive in place of those in the wheel."""
        folder.mkdir(parents=True, exist_ok=True)
        package = {**SOURCES, **(BUILT if built is None else built)}
        kit = cls(
            folder,
            package,
            SOURCES if sources is None else sources,
            INFO if info is None else info,
            tag,
            record,
        )
        make_wheel(kit.official, kit.package, kit.info, record=record)
        make_sdist(kit.sdist, {**kit.sources, "tests/test_demo.py": b"", "PKG-INFO": b"x"})
        return kit

    @property
    def official(self) -> Path:
        """The official wheel."""
        return self.folder / f"demo-1.0.0-{self.tag}.whl"

    @property
    def sdist(self) -> Path:
        """The source archive."""
        return self.folder / "demo-1.0.0.tar.gz"

    @property
    def pin(self) -> Pin:
        """The pin of what lies in the folder."""
        return parse_pin(self.pin_text(), source="kit")

    def pin_text(self) -> str:
        """Return the pin as TOML."""
        sdist, wheel = self.sdist.read_bytes(), self.official.read_bytes()
        return (
            'schema = 1\ndistribution = "demo"\nrelease = "1.0.0"\ngit = "https://example.invalid/demo.git"\n'
            f'tag = "v1.0.0"\n[sdist]\nfilename = "{self.sdist.name}"\nsha256 = "{sha256_bytes(sdist)}"\n'
            f'size = {len(sdist)}\n[[wheels]]\narch = "{ARCH}"\nfilename = "{self.official.name}"\n'
            f'sha256 = "{sha256_bytes(wheel)}"\nsize = {len(wheel)}\n'
            '[layout]\npackage = "demo"\n'
            'native = ["csrc/", "setup.py", "demo/_custom_ops.py", "demo/csrc/"]\n'
            'generated = ["demo.egg-info/", "PKG-INFO", "demo/_version.py"]\n'
            'version_file = "demo/_version.py"\n'
        )

    def plan(self, changes: tuple[FileChange, ...] = CHANGES, version: str = "1.0.0+bw.1") -> OverlayPlan:
        """Return the plan of an overlay on this wheel."""
        return OverlayPlan(
            target="demo",
            pin=self.pin,
            wheel=self.pin.wheels[0],
            version=Version(version),
            stack_id=STACK_ID,
            patches=(make_patch(),),
            changes=changes,
            notice="vLLM Blackwell stack\nNotice text.\n",
        )

    def build(
        self, folder: Path, changes: tuple[FileChange, ...] = CHANGES, *, version: str = "1.0.0+bw.1"
    ) -> OverlayResult:
        """Build the overlay into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        return build_overlay(self.plan(changes, version), self.official, self.sdist, folder)
