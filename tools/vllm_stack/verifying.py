"""Finding what to verify: the target that a wheel belongs to, its report, and installations."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from vllm_stack.build import expected_stack, report_path
from vllm_stack.errors import IntegrityError, UsageError
from vllm_stack.findings import Finding
from vllm_stack.hashing import sha256_file
from vllm_stack.installed import Installations, InstalledContents, default_python, find_installations
from vllm_stack.overlay import find_dist_info
from vllm_stack.pins import Pin, load_pin
from vllm_stack.verify import Expected, Verification, Verifier, WheelContents
from vllm_stack.wheelmeta import header_value
from vllm_stack.wheelzip import WheelArchive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_stack.workspace import Workspace


class Stacks:
    """The stacks of the workspace, each applied at most once and only when a wheel needs it."""

    def __init__(self, workspace: Workspace, *, offline: bool) -> None:
        self._workspace = workspace
        self._offline = offline
        self._expected: dict[str, Expected] = {}
        self._notes: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be compared, and why."""
        return tuple(self._notes.values())

    def pin(self, target: str) -> Pin:
        """Return a target's pin."""
        return load_pin(self._workspace.pin_file(target))

    def target_of(self, distribution: str) -> str | None:
        """Return the target whose distribution it is, or None."""
        name = canonicalize_name(distribution)
        targets = self._workspace.targets()
        return next(
            (item for item in targets if canonicalize_name(self.pin(item).distribution) == name), None
        )

    def expected(self, target: str) -> Expected:
        """Return what a wheel of the target has to be."""
        if target not in self._expected:
            self._expected[target], note = expected_stack(self._workspace, target, offline=self._offline)
            if note:
                self._notes[target] = note
        return self._expected[target]


def verify_wheel(stacks: Stacks, path: Path) -> Verification:
    """Verify the wheel at ``path``, with the report beside it if there is one.

    IntegrityError when what it is compared with is damaged; a damaged wheel is a finding.
    """
    with ExitStack() as opened:
        try:
            archive = opened.enter_context(WheelArchive.open(path))
            target, contents = _target_of(stacks, archive), WheelContents(archive)
        except IntegrityError as error:
            finding = Finding("damaged", path.name, error.message)
            found = Verification(
                path.name, "unknown", "unknown", patched=False, stack_id=None, findings=(finding,)
            )
        else:
            pin, expected = stacks.pin(target), stacks.expected(target)
            found = Verifier(contents, pin, filename=path.name, expected=expected).run()
    return replace(found, findings=(*found.findings, *_check_report(path)))


def _target_of(stacks: Stacks, archive: WheelArchive) -> str:
    path = f"{find_dist_info(archive)}/METADATA"
    name = header_value(archive.read(path), "Name", source=path)
    target = stacks.target_of(name)
    if target is None:
        raise UsageError(f"{archive.name} is a wheel of {name}, which is no target of this repository")
    return target


def _check_report(path: Path) -> Iterator[Finding]:
    """Compare a wheel with the report that was written with it."""
    report = report_path(path)
    if not report.exists():
        return
    try:
        output = json.loads(report.read_bytes())["output"]
        stated = [output["filename"], output["sha256"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield Finding("report-invalid", report.name, f"is no report of build-wheel: {error}")
        return
    if not all(isinstance(value, str) for value in stated):
        yield Finding("report-invalid", report.name, f"its output is no file name and hash: {stated}")
        return
    actual = [path.name, sha256_file(path)]
    if actual != stated:
        yield Finding(
            "report-mismatch", report.name, f"describes {' '.join(stated)}, the wheel is {' '.join(actual)}"
        )


def verify_installed(
    stacks: Stacks, targets: tuple[str, ...], python: str | None, *, explicit: bool
) -> tuple[str, tuple[Verification, ...]]:
    """Verify what an interpreter has installed of the targets; return its path and the outcomes.

    A target that is not installed is a finding when it was named (``explicit``), or when none is.
    """
    program = python or default_python()
    pins = {target: stacks.pin(target) for target in targets}
    places = {
        target: find_installations(program, pin.distribution, pin.layout.package)
        for target, pin in pins.items()
    }
    none = not any(place.dist_infos for place in places.values())
    verified = [
        _verify_installation(stacks, target, pins[target], place)
        for target, place in places.items()
        if place.dist_infos or explicit or none
    ]
    return next(iter(places.values())).python, tuple(verified)


def _verify_installation(stacks: Stacks, target: str, pin: Pin, place: Installations) -> Verification:
    if not place.dist_infos:
        finding = Finding("not-installed", pin.distribution, f"{place.python} has no {pin.distribution}")
        return Verification(
            place.python, pin.distribution, "none", patched=False, stack_id=None, findings=(finding,)
        )
    contents = InstalledContents(place.dist_infos[0], place.roots[0], pin.layout.package)
    found = Verifier(contents, pin, expected=stacks.expected(target)).run()
    return replace(found, findings=(*found.findings, *_check_place(place, pin)))


def _check_place(place: Installations, pin: Pin) -> Iterator[Finding]:
    """The distribution is installed once, and it is the one that gets imported."""
    for other in place.dist_infos[1:]:
        yield Finding("installed-twice", str(other), f"a second installation of {pin.distribution}")
    package = place.roots[0] / pin.layout.package
    for imported in place.imported[:1]:
        if imported.resolve() != package.resolve():
            yield Finding("import-elsewhere", str(imported), f"is imported instead of {package}")
