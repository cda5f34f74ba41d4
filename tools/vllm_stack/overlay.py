"""Overlay wheels: the official wheel with the files replaced that the stack changes.

Compiled parts stay as upstream built them. That is exact because every file of the package in the source
distribution is in the official wheel byte for byte, which is checked on every build.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from packaging.utils import parse_wheel_filename

from vllm_stack.classify import PathClass, classify
from vllm_stack.errors import BuildError, IntegrityError
from vllm_stack.native import HEADER_SIZE, audit_native, is_library_name, is_native
from vllm_stack.record import Digest, parse_record
from vllm_stack.sbom import FILE_NAME, Materials, write_sbom
from vllm_stack.sdist import read_sdist
from vllm_stack.wheelmeta import (
    check_python,
    rewrite_metadata,
    rewrite_version_module,
    rewrite_wheel,
    with_change_notice,
)
from vllm_stack.wheelnotice import changes_text, metadata_notice
from vllm_stack.wheelwriter import WheelWriter, create_wheel, dist_info_of
from vllm_stack.wheelzip import WheelArchive

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from packaging.tags import Tag
    from packaging.version import Version

    from vllm_stack.patch import Patch
    from vllm_stack.pins import Layout, Pin, PinnedFile, PinnedWheel

NOTICE_FILE = "NOTICE"


@dataclass(frozen=True)
class FileChange:
    """The net change of one file of the upstream tree by the whole stack."""

    path: str
    data: bytes | None
    """Its new content; None when the stack removes it."""
    patches: tuple[str, ...]
    """Names of the patches that touch it, in order."""
    added: bool = False
    """True when upstream has no such file."""
    executable: bool | None = None
    """What the stack makes of its executable bit; None when it leaves the bit as it is."""
    original: Digest | None = None
    """What the base has there, to be compared with the source distribution; None when not known."""


@dataclass(frozen=True)
class OverlayPlan:
    """What is put on top of which official wheel."""

    target: str
    pin: Pin
    wheel: PinnedWheel
    version: Version
    stack_id: str
    patches: tuple[Patch, ...]
    changes: tuple[FileChange, ...]
    notice: str
    """Text of our NOTICE file."""

    @property
    def filename(self) -> str:
        """Name of the patched wheel."""
        name, _, tags = self.wheel.filename.split("-", 2)
        return f"{name}-{self.version}-{tags}"


@dataclass(frozen=True)
class OverlayResult:
    """A patched wheel."""

    path: Path
    sha256: str
    size: int
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]


def select_package_changes(
    paths: Iterable[tuple[str, tuple[str, ...]]], layout: Layout
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split changed paths into those that go into the wheel and those that are left out.

    ``paths`` are (path, names of the patches that touch it). BuildError, naming all of them, when one needs
    a build from source or is written by the build; BuildError when nothing is left for the wheel.
    """
    found = [(path, patches, classify(path, layout)) for path, patches in paths]
    refused = [
        f"{path} ({', '.join(patches)})"
        for path, patches, kind in found
        if kind is PathClass.NATIVE or path == layout.version_file
    ]
    if refused:
        raise BuildError(
            "the stack changes sources of compiled parts, or files tied to them: no overlay can carry these",
            details=refused,
            hint="take the change out of these patches; a wheel with it needs a build from source",
        )
    package = tuple(path for path, _, kind in found if kind is PathClass.PACKAGE)
    if not package:
        raise BuildError(
            f"the stack changes nothing below {layout.package}/: the wheel would be the official one",
            hint="`vllm-stack status` shows the patches",
        )
    return package, tuple(path for path, _, kind in found if kind is PathClass.OUTSIDE)


def build_overlay(plan: OverlayPlan, official: Path, sdist: Path, folder: Path) -> OverlayResult:
    """Write the patched wheel into ``folder``, which must exist, and return what was written.

    ``official`` and ``sdist`` are checked against the pin before they are read. Raises IntegrityError when
    they are not the pinned files or do not agree with each other, BuildError when the changes do not fit or
    the wheel cannot be written.
    """
    try:
        file = official.open("rb")
    except OSError as error:
        raise IntegrityError(f"cannot read {official}: {error.strerror}") from error
    # Checking both takes seconds for vllm, and neither needs the other.
    with file, ThreadPoolExecutor(1) as pool:
        sources = pool.submit(source_digests, sdist, plan.pin)
        check_pinned(file, plan.wheel)
        overlay = _Overlay(plan, WheelArchive(file, official.name))
        overlay.check_sources(sources.result())
        return overlay.write(folder)


def check_pinned(file: BinaryIO, pinned: PinnedFile) -> None:
    """Raise IntegrityError when an open file is not the pinned one; leaves it at its end."""
    actual = Digest.of_stream(file).sha256
    if actual != pinned.sha256:
        raise IntegrityError(
            f"{pinned.filename}: expected sha256 {pinned.sha256}, it has {actual}",
            hint="remove the file and let `vllm-stack fetch` get it again",
        )


def source_digests(sdist: Path, pin: Pin) -> dict[str, Digest]:
    """Return hash and size of each file of the package in the pinned sdist.

    IntegrityError when ``sdist`` is not the pinned one.
    """
    try:
        with sdist.open("rb") as file:
            check_pinned(file, pin.sdist)
    except OSError as error:
        raise IntegrityError(f"cannot read {sdist}: {error.strerror}") from error
    prefix = f"{pin.layout.package}/"
    files = read_sdist(sdist, pin.layout)
    return {file.path: Digest.of(file.data) for file in files if file.path.startswith(prefix)}


def find_dist_info(archive: WheelArchive) -> str:
    """Return the name of a wheel's only dist-info folder. IntegrityError when there is not one."""
    folders = {name.split("/")[0] for name in archive.members if name.split("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        raise IntegrityError(f"{archive.name} has {len(folders)} dist-info folders, expected one")
    return folders.pop()


class _Overlay:
    """One build: the official wheel's files, and what becomes of each."""

    def __init__(self, plan: OverlayPlan, archive: WheelArchive) -> None:
        self._plan = plan
        self._archive = archive
        self._old_info = find_dist_info(archive)
        self._new_info = dist_info_of(plan.filename)
        self._record = self._read_record()
        self._written: dict[str, bytes] = {}
        self._audit_native()

    def _read_record(self) -> dict[str, Digest]:
        """Return RECORD's rows, which have to be those of the archive."""
        own = f"{self._old_info}/RECORD"
        if self._old_info != dist_info_of(self._plan.wheel.filename):
            raise IntegrityError(f"{self._archive.name} holds {self._old_info}")
        rows = parse_record(self._archive.read(own), source=f"RECORD of {self._archive.name}")
        rows.pop(own, None)
        members = self._archive.members.keys() - {own}
        odd = sorted(members ^ rows.keys()) or [path for path, row in rows.items() if row is None]
        if odd:
            raise IntegrityError(f"RECORD of {self._archive.name} and its files differ", details=odd[:20])
        return {path: row for path, row in rows.items() if row is not None}

    def _tags(self) -> frozenset[Tag]:
        return parse_wheel_filename(self._plan.wheel.filename)[3]

    def _audit_native(self) -> None:
        """Raise IntegrityError when a native file is not for what the wheel's tag says."""
        faults: list[str] = []
        for name, member in self._archive.members.items():
            head = self._archive.head(name, HEADER_SIZE)
            if is_library_name(name) or is_native(head):
                chunks = self._archive.content(member)
                faults += (f"{name}: {fault}" for fault in audit_native(name, head, self._tags(), chunks))
        if faults:
            raise IntegrityError(
                f"{self._archive.name} holds files that its tag does not fit", details=faults
            )

    def check_sources(self, sources: Mapping[str, Digest]) -> None:
        """Raise IntegrityError unless each file of the package in the sdist is in the wheel as it is."""
        layout = self._plan.pin.layout
        differing = [
            path
            for path, digest in sources.items()
            if self._record.get(path) != digest
            # Sources of compiled parts need not be installed.
            and not (path not in self._record and classify(path, layout) is PathClass.NATIVE)
        ]
        if differing:
            raise IntegrityError(
                f"{len(differing)} files of the sdist are not in the official wheel as they are",
                details=differing[:20],
                hint="an overlay is exact only where both agree; this release needs a build from source",
            )
        self._check_base(sources)
        self._check_changes(sources)

    def _check_base(self, sources: Mapping[str, Digest]) -> None:
        """Raise IntegrityError unless the stack was applied to the files of the source distribution."""
        foreign = [
            change.path
            for change in self._plan.changes
            if change.original is not None and change.original != sources.get(change.path)
        ]
        if foreign:
            raise IntegrityError(
                f"{len(foreign)} files that the stack changes are not in the cached base as in the sdist",
                details=foreign[:20],
                hint="remove the folder bases of the cache and run the command again",
            )

    def _check_changes(self, sources: Mapping[str, Digest]) -> None:
        """Raise BuildError when a change does not fit the files that there are."""
        faults: list[str] = []
        for change in self._plan.changes:
            who = f"{change.path} ({', '.join(change.patches)})"
            if not change.path.startswith(f"{self._plan.pin.layout.package}/"):
                faults.append(f"{who}: not below the package")
            elif change.path in self._record and change.path not in sources:
                faults.append(f"{who}: the official wheel has a file there that the build made")
            elif change.added != (change.path not in self._record):
                faults.append(
                    f"{who}: {'added, but' if change.added else 'changed, but not'} in the official wheel"
                )
            elif not self._differs(change):
                faults.append(f"{who}: listed as changed, but as it is in the official wheel")
        paths = Counter(change.path for change in self._plan.changes)
        faults += [f"{path}: listed more than once" for path, count in paths.items() if count > 1]
        if faults or not self._plan.changes:
            raise BuildError("the stack's changes do not fit the official wheel", details=faults)

    def _differs(self, change: FileChange) -> bool:
        """Say whether a change leaves the wheel's file with another content or executable bit."""
        if change.added or change.data is None or Digest.of(change.data) != self._record.get(change.path):
            return True
        return change.executable not in (None, self._archive.member(change.path).executable)

    def write(self, folder: Path) -> OverlayResult:
        """Write the wheel into ``folder``."""
        self._prepare_package()
        self._prepare_dist_info()
        path = folder / self._plan.filename
        with create_wheel(path) as writer:
            self._write_members(writer)
        return OverlayResult(path, writer.sha256, writer.size, *self._summary())

    def _removed(self) -> set[str]:
        return {change.path for change in self._plan.changes if change.data is None}

    def _summary(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return the paths that were changed, added, removed, each sorted."""
        present = {change.path for change in self._plan.changes if change.data is not None}
        changed = present & self._record.keys()
        return tuple(sorted(changed)), tuple(sorted(present - changed)), tuple(sorted(self._removed()))

    def _prepare_package(self) -> None:
        """Make the files below the package."""
        for change in self._plan.changes:
            if change.data is None:
                continue
            if change.path.endswith((".py", ".pyi")):
                _check_parses(change)
            self._written[change.path] = shipped_bytes(change, self._plan.version)
        version_file = self._plan.pin.layout.version_file
        if version_file is not None:
            source = self._archive.read(version_file)
            self._written[version_file] = shipped_version_module(version_file, source, self._plan.version)

    def _prepare_dist_info(self) -> None:
        """Make the files of the dist-info folder that differ from the official ones, but for RECORD."""
        plan, changes = self._plan, changes_text(*self._summary(), self._plan.pin.layout.version_file)
        metadata = self._archive.member(f"{self._old_info}/METADATA")
        *_, python, abi, platform = plan.wheel.filename.removesuffix(".whl").split("-")
        existing = f"{self._old_info}/licenses/{NOTICE_FILE}"
        theirs = self._archive.read(existing).decode() + "\n" if existing in self._archive.members else ""
        self._put_info(
            "METADATA",
            rewrite_metadata(
                self._archive.read(metadata.name),
                plan.version,
                metadata_notice(plan.pin, plan.version, plan.patches, changes),
                NOTICE_FILE,
            ),
        )
        self._put_info(
            "WHEEL", rewrite_wheel(self._archive.read(f"{self._old_info}/WHEEL"), python, abi, platform)
        )
        self._put_info(f"licenses/{NOTICE_FILE}", f"{theirs}{plan.notice.rstrip()}\n\n{changes}".encode())
        sbom = write_sbom(self._materials(), plan.pin, plan.wheel, plan.patches, metadata.time)
        self._put_info(f"sboms/{FILE_NAME}", sbom)

    def _put_info(self, name: str, data: bytes) -> None:
        self._written[f"{self._new_info}/{name}"] = data

    def _materials(self) -> Materials:
        plan = self._plan
        package = {path: data for path, data in self._written.items() if not path.startswith(self._new_info)}
        return Materials(
            target=plan.target,
            distribution=plan.pin.distribution,
            version=str(plan.version),
            stack_id=plan.stack_id,
            official_file=plan.wheel.filename,
            official_sha256=plan.wheel.sha256,
            patches=tuple((patch.name, patch.sha256) for patch in plan.patches),
            files={path: Digest.of(data).sha256 for path, data in sorted(package.items())},
            removed=tuple(sorted(self._removed())),
        )

    def _data_name(self, name: str) -> str:
        """Return the name of a member in the new wheel: the data folder has the version in its name too."""
        old, new = (info.removesuffix(".dist-info") + ".data/" for info in (self._old_info, self._new_info))
        return new + name.removeprefix(old) if name.startswith(old) else name

    def _write_members(self, writer: WheelWriter) -> None:
        """Copy what stays in the official order, then add what is new, the dist-info folder last."""
        gone = self._written.keys() | self._removed()
        info = [name for name in self._archive.members if name.startswith(f"{self._old_info}/")]
        for name in self._archive.members:
            if name not in gone and name not in info:
                writer.copy(self._archive, name, self._record[name], new_name=self._data_name(name))
        bits = {change.path: change.executable for change in self._plan.changes}
        for name in sorted(self._written, key=lambda name: (name.startswith(self._new_info), name)):
            old, bit = self._archive.members.get(name), bits.get(name)
            executable = (old is not None and old.executable) if bit is None else bit
            writer.add(name, self._written[name], executable=executable)
        for name in info:
            renamed = self._new_info + name.removeprefix(self._old_info)
            if renamed not in self._written and not name.endswith(_NOT_COPIED):
                writer.add(renamed, self._archive.read(name))


#: RECORD is written anew; the others say where a wheel came from, which is no longer true.
_NOT_COPIED = ("/RECORD", "/RECORD.jws", "/RECORD.p7s", "/direct_url.json")


def shipped_bytes(change: FileChange, version: Version) -> bytes:
    """Return a changed or added file as the wheel has it."""
    if change.data is None:
        raise BuildError(f"{change.path} is removed by the stack and has no bytes to ship")
    if change.added:
        return change.data
    return with_change_notice(change.path, change.data, change.patches, version)


def shipped_version_module(path: str, source: bytes, version: Version) -> bytes:
    """Return the version module as the wheel has it."""
    return with_change_notice(path, rewrite_version_module(source, version), (), version)


def _check_parses(change: FileChange) -> None:
    try:
        check_python(change.path, change.data or b"")
    except IntegrityError as error:
        raise BuildError(f"{error.message} (changed by {', '.join(change.patches)})") from error
