"""Is a wheel, or an installation, the patched one: every file, every statement of version and tag, the stack.

A check yields findings (their codes: :mod:`vllm_stack.findings`) and never stops at the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from vllm_stack.classify import PathClass, classify
from vllm_stack.errors import IntegrityError
from vllm_stack.findings import Finding
from vllm_stack.native import HEADER_SIZE, audit_native, is_library_name, is_native
from vllm_stack.overlay import FileChange, find_dist_info, shipped_bytes
from vllm_stack.record import Digest, parse_record
from vllm_stack.sbom import FILE_NAME, Materials, read_sbom
from vllm_stack.version import is_ours
from vllm_stack.wheelmeta import header_value, header_values, read_version_module, version_tuple, wheel_tags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm_stack.pins import Pin
    from vllm_stack.wheelzip import WheelArchive


@dataclass(frozen=True)
class Expected:
    """The stack at hand, by which a wheel is judged."""

    pin: Pin
    version: Version
    """What the stack's wheel is called without a user's label."""
    stack_id: str
    patches: tuple[tuple[str, str], ...]
    """(name, sha256) in order."""
    released: dict[str, int]
    """Numbers of the released stacks on this release, by stack id."""
    changes: tuple[FileChange, ...] | None
    """None when only hashes of patches are compared, because the sources are not at hand."""
    sources: Mapping[str, Digest] | None = None
    """The package's files in upstream's sources that the stack leaves alone; None: these are not compared."""


class Contents(Protocol):
    """Files of a wheel or of an installation."""

    label: str
    dist_info: str
    strict: bool
    """True for a wheel: nothing may be there that RECORD does not list with a hash."""

    def paths(self) -> set[str]:
        """Return all files that RECORD should list."""

    def exists(self, path: str) -> bool:
        """Say whether there is a file ``path``."""

    def ignores(self, path: str) -> bool:
        """Say whether RECORD may leave ``path``, or its hash, out."""

    def digest(self, path: str) -> Digest:
        """Return hash and size of a file. IntegrityError when it cannot be read."""

    def read(self, path: str) -> bytes:
        """Return a file's content. IntegrityError when it cannot be read."""

    def head(self, path: str, size: int) -> bytes:
        """Return a file's first bytes. IntegrityError when it cannot be read."""


class WheelContents:
    """The files in a wheel."""

    strict = True

    def __init__(self, archive: WheelArchive) -> None:
        self._archive = archive
        self.label = archive.name
        self.dist_info = find_dist_info(archive)

    def paths(self) -> set[str]:
        """Return the names of all members."""
        return set(self._archive.members)

    def exists(self, path: str) -> bool:
        """Say whether there is such a member."""
        return path in self._archive.members

    def ignores(self, path: str) -> bool:
        """Only RECORD has no hash of itself."""
        return path == f"{self.dist_info}/RECORD"

    def digest(self, path: str) -> Digest:
        """Return hash and size of a member's content."""
        return self._archive.digest(path)

    def read(self, path: str) -> bytes:
        """Return a member's content."""
        return self._archive.read(path)

    def head(self, path: str, size: int) -> bytes:
        """Return the first bytes of a member's content."""
        return self._archive.head(path, size)


@dataclass(frozen=True)
class Verification:
    """The outcome for one wheel or installation."""

    subject: str
    distribution: str
    version: str
    patched: bool
    stack_id: str | None
    findings: tuple[Finding, ...]


class Verifier:
    """The checks of one wheel or installation."""

    def __init__(
        self, contents: Contents, pin: Pin, *, filename: str | None = None, expected: Expected | None = None
    ) -> None:
        """``filename`` is the wheel's name; ``expected`` the stack to compare with, if there is one."""
        self._contents = contents
        self._pin = pin
        self._filename = filename
        self._expected = expected
        self._actual: dict[str, Digest] = {}

    def run(self) -> Verification:
        """Run all checks and return what they found, in a fixed order."""
        checks: tuple[Callable[[], Iterator[Finding]], ...] = (
            self._check_record,
            self._check_versions,
            self._check_file_name,
            self._check_native,
            self._check_licenses,
            self._check_patched,
            self._check_stack,
        )
        found = [finding for check in checks for finding in self._guarded(check)]
        materials = self._materials if self._sbom_readable else None
        return Verification(
            subject=self._contents.label,
            distribution=self._pin.distribution,
            version=self._metadata_version or "unknown",
            patched=materials is not None,
            stack_id=materials.stack_id if materials else None,
            # Several checks may read one damaged file.
            findings=tuple(dict.fromkeys(found)),
        )

    def _guarded(self, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        """Turn what a check cannot read into a finding."""
        try:
            yield from check()
        except IntegrityError as error:
            yield Finding("damaged", self._contents.label, error.message)

    def _find(self, code: str, message: str, subject: str | None = None) -> Finding:
        return Finding(code, subject or self._contents.label, message)

    def _info(self, name: str) -> str:
        return f"{self._contents.dist_info}/{name}"

    def _check_record(self) -> Iterator[Finding]:
        """RECORD and the files, in both directions."""
        contents, own = self._contents, self._info("RECORD")
        if not contents.exists(own):
            yield self._find("record-absent", "there is no RECORD", own)
            return
        rows = parse_record(contents.read(own), source=own)
        if own not in rows:
            yield self._find("record-unlisted", "RECORD does not list itself", own)
        for path in sorted(contents.paths() - rows.keys()):
            if contents.strict or not contents.ignores(path):
                yield self._find("record-unlisted", "is there, but not in RECORD", path)
        for path, row in rows.items():
            yield from self._check_row(path, row)

    def _check_row(self, path: str, row: Digest | None) -> Iterator[Finding]:
        contents = self._contents
        if not contents.exists(path):
            # Python and installers may remove what they made.
            if contents.strict or not contents.ignores(path):
                yield self._find("record-missing", "is in RECORD, but not there", path)
        elif row is None:
            if not contents.ignores(path):
                yield self._find("record-no-hash", "has no hash in RECORD", path)
        else:
            yield from self._check_content(path, row)

    def _check_content(self, path: str, row: Digest) -> Iterator[Finding]:
        try:
            actual = self._digest(path)
        except IntegrityError as error:
            yield self._find("damaged", error.message, path)
            return
        if actual.size != row.size:
            yield self._find("record-mismatch", f"has {actual.size} bytes, RECORD says {row.size}", path)
        elif actual != row:
            yield self._find("record-mismatch", f"has sha256 {actual.sha256}, RECORD says {row.sha256}", path)

    def _digest(self, path: str) -> Digest:
        if path not in self._actual:
            self._actual[path] = self._contents.digest(path)
        return self._actual[path]

    @cached_property
    def _metadata_version(self) -> str | None:
        try:
            path = self._info("METADATA")
            return header_value(self._contents.read(path), "Version", source=path)
        except IntegrityError:
            return None

    @cached_property
    def _version(self) -> Version | None:
        try:
            return Version(self._metadata_version or "")
        except InvalidVersion:
            return None

    def _check_versions(self) -> Iterator[Finding]:
        """METADATA, the dist-info folder and the version module name one version."""
        path, version = self._info("METADATA"), self._version
        name = header_value(self._contents.read(path), "Name", source=path)
        if canonicalize_name(name) != canonicalize_name(self._pin.distribution):
            yield self._find("name", f"METADATA is that of {name}", path)
        if version is None:
            yield self._find("version-metadata", f"METADATA states {self._metadata_version!r}", path)
            return
        stated = self._contents.dist_info.removesuffix(".dist-info").rpartition("-")[2]
        if not _same_version(stated, version):
            yield self._find("version-dist-info", f"the folder says {stated}, METADATA {version}")
        yield from self._check_data_folder()
        yield from self._check_module(version)

    def _check_data_folder(self) -> Iterator[Finding]:
        """Installers take no other data folder than the one named like the dist-info folder."""
        right = self._contents.dist_info.removesuffix(".dist-info") + ".data"
        tops = {path.split("/")[0] for path in self._contents.paths() if "/" in path}
        for top in sorted(top for top in tops if top.endswith(".data") and top != right):
            yield self._find("version-dist-info", f"the data folder is {top}, it must be {right}")

    def _check_module(self, version: Version) -> Iterator[Finding]:
        path = self._pin.layout.version_file
        if path is None:
            return
        if not self._contents.exists(path):
            yield self._find("version-module", "the version module is missing", path)
            return
        module = read_version_module(self._contents.read(path))
        if not module.versions or any(stated != str(version) for stated in module.versions):
            stated = ", ".join(module.versions) or "nothing"
            yield self._find("version-module", f"states {stated}, METADATA {version}", path)
        if not module.tuples or any(parts != version_tuple(version) for parts in module.tuples):
            yield self._find("version-module", f"its tuple is not that of {version}: {module.tuples}", path)

    def _check_file_name(self) -> Iterator[Finding]:
        """The wheel's name says what METADATA and WHEEL say."""
        if self._filename is None:
            return
        try:
            name, version, _, tags = parse_wheel_filename(self._filename)
        except InvalidWheelFilename as error:
            yield self._find("file-name", str(error))
            return
        if name != canonicalize_name(self._pin.distribution):
            yield self._find("file-name", f"the file name is that of {name}")
        if version != self._version:
            yield self._find(
                "version-file-name",
                f"the file name says {version}, METADATA {self._metadata_version} (renamed?)",
            )
        stated = wheel_tags(self._contents.read(self._info("WHEEL")))
        if stated != tags:
            shown = ", ".join(sorted(map(str, stated))) or "nothing"
            wanted = ", ".join(sorted(map(str, tags)))
            yield self._find("tags", f"states {shown}, the file name {wanted}", self._info("WHEEL"))

    def _check_native(self) -> Iterator[Finding]:
        """Each native file is for what the tags in WHEEL say."""
        contents, tags = self._contents, wheel_tags(self._contents.read(self._info("WHEEL")))
        for path in sorted(contents.paths()):
            try:
                head = contents.head(path, HEADER_SIZE)
            except IntegrityError:
                continue  # _check_record reads all of it and says so
            if is_library_name(path) or is_native(head):
                for fault in audit_native(path, head, tags, _Lazy(contents, path)):
                    yield self._find("native-tag", fault, path)

    def _check_licenses(self) -> Iterator[Finding]:
        """The licence files that METADATA names are there, and a wheel does not say where it came from."""
        for name in header_values(self._contents.read(self._info("METADATA")), "License-File"):
            if not self._contents.exists(self._info(f"licenses/{name}")):
                yield self._find("license-missing", "METADATA names it", self._info(f"licenses/{name}"))
        if self._contents.strict and self._contents.exists(self._info("direct_url.json")):
            yield self._find("direct-url", "must not be in a wheel", self._info("direct_url.json"))

    @property
    def _sbom_path(self) -> str:
        return self._info(f"sboms/{FILE_NAME}")

    @cached_property
    def _materials(self) -> Materials:
        return read_sbom(self._contents.read(self._sbom_path))

    @property
    def _sbom_readable(self) -> bool:
        try:
            return bool(self._materials.stack_id)
        except IntegrityError:
            return False

    def _check_patched(self) -> Iterator[Finding]:
        """It says that it is patched, and is what its SBOM says."""
        ours = self._version is not None and is_ours(self._version)
        if not self._contents.exists(self._sbom_path):
            if ours:
                yield self._find("sbom-missing", f"the version is {self._version}, but there is no SBOM")
            else:
                yield self._find("unpatched", f"version {self._metadata_version} is not one of this stack's")
            return
        if not ours:
            yield self._find(
                "unpatched", f"there is an SBOM of this stack, but the version is {self._version}"
            )
        materials = self._materials
        if materials.version != str(self._version):
            yield self._find("sbom-version", f"made for version {materials.version}", self._sbom_path)
        for path, sha256 in materials.files.items():
            if not self._contents.exists(path) or self._digest(path).sha256 != sha256:
                yield self._find("sbom-file", "is not the file that the SBOM names", path)
        for path in materials.removed:
            if self._contents.exists(path):
                yield self._find("sbom-removed", "is there, the SBOM says it was removed", path)

    def _check_stack(self) -> Iterator[Finding]:
        """It was made of the stack at hand."""
        expected = self._expected
        if expected is None or not self._contents.exists(self._sbom_path):
            return
        materials = self._materials
        if materials.stack_id != expected.stack_id:
            yield self._other_stack(materials, expected)
            return
        if materials.patches != expected.patches:
            yield self._find("stack-patches", "its SBOM lists other patches than the stack", self._sbom_path)
        official = {wheel.filename: wheel.sha256 for wheel in expected.pin.wheels}
        if official.get(materials.official_file) != materials.official_sha256:
            yield self._find("stack-official", f"made of {materials.official_file}, which is not pinned")
        if self._version is not None and not _labelled(self._version, expected.version):
            yield self._find("stack-version", f"version {self._version}, the stack gives {expected.version}")
        yield from self._check_members(expected)
        yield from self._check_sources(expected)

    def _other_stack(self, materials: Materials, expected: Expected) -> Finding:
        number = expected.released.get(materials.stack_id)
        which = f"release {number}" if number is not None else f"stack {materials.stack_id[:12]}"
        return self._find("stack-id", f"made of {which}, the stack here is {expected.stack_id[:12]}")

    def _check_members(self, expected: Expected) -> Iterator[Finding]:
        """The patched files are those that the stack gives, byte for byte."""
        if expected.changes is None or self._version is None:
            return
        for change in expected.changes:
            if change.data is None:
                if self._contents.exists(change.path):
                    yield self._find("stack-member", "is there, the stack removes it", change.path)
            elif not self._contents.exists(change.path):
                yield self._find("stack-member", "is missing", change.path)
            elif self._digest(change.path) != Digest.of(shipped_bytes(change, self._version)):
                because = ", ".join(change.patches)
                yield self._find("stack-member", f"is not what the stack gives ({because})", change.path)
        own = {change.path for change in expected.changes} | {self._pin.layout.version_file}
        for path in sorted((self._materials.files.keys() | set(self._materials.removed)) - own):
            yield self._find("stack-member", "is changed, but not by the stack", path)

    def _check_sources(self, expected: Expected) -> Iterator[Finding]:
        """The files that the stack leaves alone are as upstream's sources have them."""
        for path, digest in (expected.sources or {}).items():
            try:
                if self._contents.exists(path):
                    if self._digest(path) != digest:
                        yield self._find("source-file", "is not what upstream's sources have", path)
                # Sources of compiled parts need not be installed.
                elif classify(path, self._pin.layout) is not PathClass.NATIVE:
                    yield self._find("source-file", "is missing", path)
            except IntegrityError as error:
                yield self._find("damaged", error.message, path)


class _Lazy:
    """A file's content as one block, read only when it is asked for."""

    def __init__(self, contents: Contents, path: str) -> None:
        self._contents = contents
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        yield self._contents.read(self._path)


def _same_version(stated: str, version: Version) -> bool:
    try:
        return Version(stated.replace("_", "-")) == version
    except InvalidVersion:
        return False


def _labelled(version: Version, plain: Version) -> bool:
    """Say whether ``version`` is ``plain``, perhaps with a user's label behind it."""
    return version == plain or str(version).startswith(f"{plain}.")
