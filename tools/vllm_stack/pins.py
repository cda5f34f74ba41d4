"""Pins: what a target is fixed to, as written in ``upstream/<target>.toml``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import Field, field_validator, model_validator

from vllm_stack.errors import UsageError
from vllm_stack.tomlfile import Sha256, Strict, parse_toml, read_toml_text

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = ("x86_64", "aarch64")
Architecture = Literal["x86_64", "aarch64"]


class PinnedFile(Strict):
    """A file of the release in the package index."""

    filename: str
    sha256: Sha256
    size: int = Field(gt=0, description="bytes")

    @field_validator("filename")
    @classmethod
    def _bare_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", value):
            raise ValueError("must be a bare file name")
        return value


class PinnedWheel(PinnedFile):
    """An official wheel of the release."""

    arch: Architecture


class Layout(Strict):
    """How the tree of the source distribution relates to the wheel.

    A name that ends in ``/`` is a folder with all that is in it; any other is one file.
    """

    package: str
    native: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    version_file: str | None = None

    @field_validator("package")
    @classmethod
    def _identifier(cls, value: str) -> str:
        if not value.isidentifier():
            raise ValueError("must be the name of a Python package")
        return value


class Pin(Strict):
    """What a target is fixed to."""

    pin_schema: Literal[1] = Field(alias="schema")
    distribution: str
    release: str
    git: str
    tag: str
    #: Commit of the tag, where it is known; the sdist hash is what the pin rests on.
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{7,40}$")
    sdist: PinnedFile
    wheels: tuple[PinnedWheel, ...] = Field(min_length=1)
    layout: Layout

    @field_validator("release")
    @classmethod
    def _public_release(cls, value: str) -> str:
        try:
            version = Version(value)
        except InvalidVersion as error:
            raise ValueError(f"not a version: {value}") from error
        if str(version) != value or version.local:
            raise ValueError(f"must be a normalized public version, e.g. {version.public}")
        return value

    @model_validator(mode="after")
    def _files_agree(self) -> Pin:
        if not self.sdist.filename.endswith(".tar.gz"):
            raise ValueError("sdist.filename must end in .tar.gz")
        for wheel in self.wheels:
            self._check_wheel(wheel)
        names = [wheel.arch for wheel in self.wheels]
        if len(set(names)) != len(names):
            raise ValueError("two wheels have the same arch")
        return self

    def _check_wheel(self, wheel: PinnedWheel) -> None:
        try:
            name, version, _, tags = parse_wheel_filename(wheel.filename)
        except InvalidWheelFilename as error:
            raise ValueError(str(error)) from error
        if name != canonicalize_name(self.distribution) or str(version) != self.release:
            raise ValueError(f"{wheel.filename} is not {self.distribution} {self.release}")
        if not all(tag.platform.endswith(wheel.arch) for tag in tags):
            raise ValueError(f"{wheel.filename} is not a wheel for {wheel.arch}")

    def wheel(self, arch: str) -> PinnedWheel:
        """Return the official wheel for ``arch``; UsageError when the pin has none."""
        for wheel in self.wheels:
            if wheel.arch == arch:
                return wheel
        known = ", ".join(wheel.arch for wheel in self.wheels)
        raise UsageError(f"the pin of {self.distribution} has no wheel for {arch}", hint=f"it has {known}")


def parse_pin(text: str, *, source: str) -> Pin:
    """Parse the text of a pin; ``source`` names it in errors (UsageError)."""
    return parse_toml(Pin, text, source=source)


def load_pin(path: Path) -> Pin:
    """Read a pin file. UsageError when it is absent or not valid."""
    return parse_pin(read_toml_text(path), source=str(path))
