"""From pins to patched wheels, and from a stack to what a wheel of it has to be."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_stack.applying import AppliedStack, Change, apply_stack
from vllm_stack.errors import BuildError, ConflictError, NetworkError, UsageError
from vllm_stack.overlay import FileChange, OverlayPlan, OverlayResult, build_overlay, select_package_changes
from vllm_stack.record import Digest
from vllm_stack.report import Report, escaped, write_json
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack
from vllm_stack.verify import Expected, Verifier, WheelContents
from vllm_stack.version import check_label, release_number, wheel_version
from vllm_stack.wheelzip import WheelArchive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.console import Console

    from vllm_stack.fetch import Fetcher
    from vllm_stack.findings import Finding
    from vllm_stack.pins import Pin, PinnedFile, PinnedWheel
    from vllm_stack.workspace import Workspace


#: git's modes of plain files, and what a path that does not exist has.
_EXECUTABLE, _NOTHING = "100755", "000000"
_PLAIN = frozenset({"100644", _EXECUTABLE, _NOTHING})
_KINDS = {"120000": "a symbolic link", "160000": "a submodule"}


@dataclass(frozen=True)
class File:
    """An input or output; ``size`` in bytes."""

    filename: str
    sha256: str
    size: int

    @classmethod
    def of(cls, pinned: PinnedFile) -> File:
        """Return what a pin says of a file."""
        return cls(pinned.filename, pinned.sha256, pinned.size)


@dataclass(frozen=True)
class UsedPatch:
    """A patch that is in the wheel."""

    name: str
    sha256: str
    subject: str


@dataclass(frozen=True)
class LeftOut:
    """A path that the stack changes and that no wheel of upstream has."""

    path: str
    patches: tuple[str, ...]


@dataclass(frozen=True)
class WheelReport(Report):
    """How one wheel was made, as ``<wheel>.json`` beside it; nothing in it depends on the machine."""

    command: ClassVar[str] = "build-wheel"
    target: str
    version: str
    release: int | None
    """The number under which this very stack was released, if it was."""
    stack_id: str
    output: File
    inputs: tuple[File, ...]
    patches: tuple[UsedPatch, ...]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    def render(self, console: Console) -> None:
        """Print the wheel, what is in it and what is not."""
        console.print(f"{self.output.filename}  {self.output.size} bytes", markup=False)
        console.print(f"  sha256 {self.output.sha256}", markup=False)
        console.print(f"  stack {self.stack_id}, {len(self.patches)} patches", markup=False)
        for word, paths in (("changed", self.changed), ("added", self.added), ("removed", self.removed)):
            for path in paths:
                console.print(f"  {word} {path}", markup=False)
        for item in self.left_out:
            console.print(f"  not in wheels: {item.path} ({', '.join(item.patches)})", markup=False)


@dataclass(frozen=True)
class BuildOptions:
    """What a user chooses about a build."""

    arch: str
    output: Path
    label: str | None = None


def file_changes(applied: AppliedStack, changes: tuple[Change, ...]) -> tuple[FileChange, ...]:
    """Return the changes with the bytes that the stack gives. BuildError for what is no plain file."""
    odd = [
        f"{item.path} ({', '.join(item.patches)}): {_KINDS.get(item.mode, 'no plain file any more')}"
        for item in changes
        if item.status == "T" or item.mode not in _PLAIN
    ]
    if odd:
        raise BuildError(
            "the stack makes symbolic links or submodules, which no wheel can hold",
            details=odd,
            hint="make these plain files, or take them out of the patches",
        )
    contents = applied.read([item.path for item in changes if item.status != "D"])
    known = [item.path for item in changes if item.old_mode in _PLAIN - {_NOTHING}]
    originals = applied.git.blobs(applied.base_commit, known)
    return tuple(
        FileChange(
            path=item.path,
            data=contents.get(item.path),
            patches=item.patches,
            added=item.status == "A",
            executable=None if item.mode == item.old_mode else item.mode == _EXECUTABLE,
            original=Digest.of(originals[item.path]) if item.path in originals else None,
        )
        for item in changes
    )


def check_names(changes: tuple[Change, ...]) -> None:
    """Raise BuildError when a changed path is none that a wheel, or a report, can name."""
    odd = [
        f"{escaped(item.path)} ({', '.join(item.patches) or 'patch unknown'})"
        for item in changes
        if not item.path.isprintable() or "\\" in item.path
    ]
    if odd:
        raise BuildError(
            "the stack changes files whose names hold line breaks, other control characters, backslashes or "
            "bytes that are not UTF-8",
            details=odd,
            hint="rename these files in the patches",
        )


def package_changes(applied: AppliedStack, pin: Pin) -> tuple[tuple[FileChange, ...], tuple[LeftOut, ...]]:
    """Return what of a stack goes into the wheel, and what is left out. BuildError as for an overlay."""
    changes = applied.changes()
    check_names(changes)
    selected, outside = select_package_changes([(item.path, item.patches) for item in changes], pin.layout)
    left_out = tuple(LeftOut(item.path, item.patches) for item in changes if item.path in outside)
    return file_changes(applied, tuple(item for item in changes if item.path in selected)), left_out


def build_wheel(workspace: Workspace, target: str, options: BuildOptions, fetcher: Fetcher) -> WheelReport:
    """Build, verify and describe the patched wheel of one target.

    The stack is applied before the official wheel is fetched, so that a stack that cannot be built costs no
    large download. Raises what its steps raise; then no wheel and no report is left behind.
    """
    if options.label is not None:
        check_label(options.label)
    stack = Stack.load(workspace, target)
    plan, left_out = plan_wheel(workspace, stack, options, offline=fetcher.offline)
    sdist = fetcher.fetch(stack.pin.distribution, stack.pin.sdist)
    official = fetcher.fetch(stack.pin.distribution, plan.wheel)
    with _output_folder(options.output):
        result = build_overlay(plan, official, sdist, options.output)
        report = _report(stack, plan.wheel, plan, result, left_out)
        _complete(result, report, _expected(stack, plan.changes))
    return report


def plan_wheel(
    workspace: Workspace, stack: Stack, options: BuildOptions, *, offline: bool
) -> tuple[OverlayPlan, tuple[LeftOut, ...]]:
    """Apply a stack; return the plan of its wheel, and what of the stack is not in it."""
    wheel = stack.pin.wheel(options.arch)
    applied = apply_stack(base_of(workspace, stack.pin, offline=offline), stack)
    changes, left_out = package_changes(applied, stack.pin)
    plan = OverlayPlan(
        target=stack.target,
        pin=stack.pin,
        wheel=wheel,
        version=wheel_version(stack.stack_id, stack.pin.release, stack.releases, options.label),
        stack_id=stack.stack_id,
        patches=stack.patches,
        changes=changes,
        notice=_notice(workspace),
    )
    return plan, left_out


def _notice(workspace: Workspace) -> str:
    path = workspace.root / "NOTICE"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="each wheel carries this file"
        ) from error


@contextmanager
def _output_folder(folder: Path) -> Iterator[None]:
    """Make the folder for the wheels; take it away again when the block fails and left it empty."""
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"cannot write to {folder}: {error.strerror}", hint="name another folder with --output"
        ) from error
    try:
        yield
    except BaseException:
        if made and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _complete(result: OverlayResult, report: WheelReport, expected: Expected) -> None:
    """Verify the written wheel and put its report beside it; remove both when either fails."""
    sidecar = report_path(result.path)
    try:
        with WheelArchive.open(result.path) as archive:
            contents = WheelContents(archive)
            verifier = Verifier(contents, expected.pin, filename=result.path.name, expected=expected)
            findings = verifier.run().findings
        _require_none(result.path.name, findings)
        write_json(str(sidecar), WheelReport.command, None, report)
    except OSError as error:
        result.path.unlink(missing_ok=True)
        raise BuildError(f"cannot write {sidecar}: {error.strerror}") from error
    except BaseException:
        result.path.unlink(missing_ok=True)
        raise


def _require_none(name: str, findings: tuple[Finding, ...]) -> None:
    if findings:
        raise BuildError(
            f"{name} did not stand its own verification and was removed",
            details=[f"{item.code}: {item.subject}: {item.message}" for item in findings],
        )


def report_path(wheel: Path) -> Path:
    """Return where the report of a wheel lies."""
    return wheel.with_name(f"{wheel.name}.json")


def _report(
    stack: Stack, wheel: PinnedWheel, plan: OverlayPlan, result: OverlayResult, left_out: tuple[LeftOut, ...]
) -> WheelReport:
    return WheelReport(
        target=stack.target,
        version=str(plan.version),
        release=release_number(stack.stack_id, stack.pin.release, stack.releases),
        stack_id=stack.stack_id,
        output=File(result.path.name, result.sha256, result.size),
        inputs=(File.of(stack.pin.sdist), File.of(wheel)),
        patches=tuple(UsedPatch(patch.name, patch.sha256, patch.subject) for patch in stack.patches),
        changed=result.changed,
        added=result.added,
        removed=result.removed,
        left_out=left_out,
    )


def _expected(
    stack: Stack,
    changes: tuple[FileChange, ...] | None,
    sources: Mapping[str, Digest] | None = None,
) -> Expected:
    release = stack.pin.release
    return Expected(
        pin=stack.pin,
        version=wheel_version(stack.stack_id, release, stack.releases),
        stack_id=stack.stack_id,
        patches=tuple((patch.name, patch.sha256) for patch in stack.patches),
        released={item.stack_id: item.number for item in stack.releases if item.upstream == release},
        changes=changes,
        sources=sources,
    )


def untouched_sources(
    applied: AppliedStack, changes: tuple[FileChange, ...], package: str
) -> dict[str, Digest]:
    """Return hash and size of each file of the package in the base that the stack leaves as it is."""
    listed = applied.git.run("ls-tree", "-r", "-z", applied.base_commit, f"{package}/").fields
    entries = [entry.partition("\t") for entry in listed]
    touched = {change.path for change in changes}
    # No wheel can hold what is no plain file, or has a name that is not printable.
    paths = [
        path
        for meta, _, path in entries
        if meta.split()[0] in _PLAIN and path.isprintable() and path not in touched
    ]
    contents = applied.git.blobs(applied.base_commit, paths)
    return {path: Digest.of(data) for path, data in contents.items()}


def expected_stack(workspace: Workspace, target: str, *, offline: bool) -> tuple[Expected, str | None]:
    """Return what a wheel of the target's current stack has to be, and a note if that is not all of it.

    The bytes of files need upstream's sources, and a stack that a wheel can be built of. Without them (not in
    the cache and no network; a stack that is being worked on) only the stack id and the hashes of patches can
    be compared. IntegrityError when the cached sources are damaged.
    """
    stack = Stack.load(workspace, target)
    try:
        applied = apply_stack(base_of(workspace, stack.pin, offline=offline), stack)
        changes, _ = package_changes(applied, stack.pin)
    except (NetworkError, ConflictError, BuildError) as error:
        note = f"{target}: patched files are compared by the wheel's own SBOM alone: {error.message}"
        return _expected(stack, None), note
    sources = untouched_sources(applied, changes, stack.pin.layout.package)
    return _expected(stack, changes, sources), None
