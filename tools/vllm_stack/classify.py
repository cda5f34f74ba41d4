"""What a path of the upstream tree is to an overlay wheel."""

from __future__ import annotations

import posixpath
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_stack.pins import Layout

#: Sources that a compiler turns into something else: replacing them in a wheel has no effect.
_COMPILED_SUFFIXES = frozenset(
    {".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".inl", ".pyx", ".pxd", ".rs", ".so"}
)


class PathClass(StrEnum):
    """The three kinds of path."""

    PACKAGE = "package"
    """Installed as it stands: an overlay replaces it."""
    NATIVE = "native"
    """Source of a compiled part, or what builds it: needs a build from source."""
    OUTSIDE = "outside"
    """Tests, documentation, benchmarks: not in the wheel."""


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Say whether ``path`` is one of ``patterns`` or lies below one that ends in ``/``."""
    return path in patterns or path.startswith(_folders(patterns))


@lru_cache(maxsize=64)
def _folders(patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if pattern.endswith("/"))


def is_compiled_source(path: str) -> bool:
    """Say whether a compiler turns ``path`` into something else, going by its suffix."""
    return posixpath.splitext(path)[1] in _COMPILED_SUFFIXES


def classify(path: str, layout: Layout) -> PathClass:
    """Return what ``path`` (relative to the tree's root, with ``/``) is under ``layout``."""
    if matches(path, layout.native):
        return PathClass.NATIVE
    if not path.startswith(f"{layout.package}/"):
        return PathClass.OUTSIDE
    if is_compiled_source(path):
        return PathClass.NATIVE
    return PathClass.PACKAGE
