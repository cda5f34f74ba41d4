"""Versions of our wheels: the upstream release with a local label that names the stack.

vLLM keys its compile cache and its multi-node handshake by the version string, so two stacks must never
share one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from packaging.version import InvalidVersion, Version

from vllm_stack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: First part of every local label that we give.
MARK = "bw"
#: Hex digits of the stack id in the label of a stack that is not released.
_ID_DIGITS = 8
#: The part that names such a stack.
_ID_PART = re.compile(rf"s[0-9a-f]{{{_ID_DIGITS}}}")


class NumberedStack(Protocol):
    """A stack that was given a number; :class:`vllm_stack.series.Release` is one."""

    @property
    def upstream(self) -> str:
        """Release of upstream that it is for."""

    @property
    def number(self) -> int:
        """Its number, counted from 1 on each upstream release."""

    @property
    def stack_id(self) -> str:
        """Its stack id, 64 hex digits."""


def check_label(label: str) -> str:
    """Return a user's label in PEP 440's normal form.

    UsageError when it is no local version label; when it contains "cpu" in any case, because vLLM looks for
    that substring in its own version and takes the wheel for a CPU build; or when it begins like the id of a
    stack, because behind a release's number that would be the very version of a stack that is not released.
    """
    try:
        # packaging matches without regard to case, which lets two non-ASCII letters through.
        normal = Version(f"0+{label}").local if label.isascii() else None
    except InvalidVersion:
        normal = None
    if normal is None or "+" in label or label != label.strip():
        raise UsageError(
            f"{label!r} is not a label for a local version (PEP 440)",
            hint="use ASCII letters and digits, in parts separated by dots, e.g. --label acme.2",
        )
    if "cpu" in normal:
        raise UsageError(
            f"the label {label!r} contains 'cpu', by which vLLM would take the wheel for a CPU build",
            hint="choose a label without these letters in a row",
        )
    if _ID_PART.fullmatch(normal.split(".")[0]):
        raise UsageError(
            f"the label {label!r} begins like the id of a stack, so that two stacks could share a version",
            hint=f"put something before it, e.g. --label acme.{normal}",
        )
    return normal


def release_number(stack_id: str, upstream: str, releases: Sequence[NumberedStack]) -> int | None:
    """Return the number under which this stack was released on ``upstream``, or None."""
    numbers = [item.number for item in releases if (item.upstream, item.stack_id) == (upstream, stack_id)]
    return max(numbers, default=None)


def wheel_version(
    stack_id: str, upstream: str, releases: Sequence[NumberedStack], label: str | None = None
) -> Version:
    """Return the version of a wheel of ``upstream`` with the stack ``stack_id``.

    ``0.33.0+bw.N`` for release N of the stack; else ``0.33.0+bw.N.s<8 hex digits of the stack id>`` with
    the highest N so far (0 if there is none). A user's label follows as further parts, so that it cannot
    give two stacks the same version.
    """
    number = release_number(stack_id, upstream, releases)
    if number is not None:
        parts = [MARK, str(number)]
    else:
        latest = max((item.number for item in releases if item.upstream == upstream), default=0)
        parts = [MARK, str(latest), f"s{stack_id[:_ID_DIGITS]}"]
    if label is not None:
        parts.append(check_label(label))
    return Version(f"{upstream}+{'.'.join(parts)}")


def is_ours(version: Version) -> bool:
    """Say whether ``version`` carries a label of this project."""
    return (version.local or "").split(".")[0] == MARK
