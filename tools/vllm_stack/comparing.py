"""Two versions of a stack side by side: pin, series, and what became of each patch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm_stack.replay import own_commits
from vllm_stack.report import to_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm_stack.git import Git
    from vllm_stack.stack import Stack

Action = Literal["unchanged", "moved", "changed", "renamed", "added", "removed"]
"""``moved``: the same change and message, at other lines or in files that upstream changed elsewhere."""
#: ``1:  0123… ! 2:  4567… Subject``, the first line of each pair in git's output.
_PAIR = re.compile(r"^\s*(?:-|\d+):\s+(\S+) ([=!<>]) \s*(?:-|\d+):\s+(\S+)( |$)")
_INDENT = 4


@dataclass(frozen=True)
class Setting:
    """A value of a pin or series that differs; None where it is not there."""

    key: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class ComparedPatch:
    """One patch in both versions."""

    name: str
    action: Action
    old_name: str | None
    subject: str
    """Of the newer one, if there is one."""
    old_position: int | None
    """From 1."""
    new_position: int | None
    interdiff: tuple[str, ...]
    """What ``git range-diff`` says of the two: a diff of message and diff."""


@dataclass(frozen=True)
class Comparison:
    """What lies between two versions of a target's stack."""

    pin: tuple[Setting, ...]
    series: tuple[Setting, ...]
    patches: tuple[ComparedPatch, ...]
    """In the new order; the removed ones last."""
    reordered: bool
    """Whether patches that both have come in another order."""


def compare_stacks(git: Git, old: tuple[Stack, str], new: tuple[Stack, str]) -> Comparison:
    """Compare two stacks, each given with the commit of its bare release; ``git`` is a workbench with both.

    ConflictError when one of them does not apply to its own release.
    """
    sides = _Side.applied(git, *old), _Side.applied(git, *new)
    patches = _Series(git, *sides).patches()
    positions = [item.old_position for item in patches if item.old_position and item.new_position]
    return Comparison(
        settings_between(old[0].pin.model_dump(by_alias=True), new[0].pin.model_dump(by_alias=True)),
        settings_between(_series(old[0]), _series(new[0])),
        patches,
        positions != sorted(positions),
    )


def _series(stack: Stack) -> dict[str, Any]:
    """Return what a series says beyond the order of its patches, each under a name that stays."""
    document = stack.series.model_dump(by_alias=True)
    return {
        "topics": {topic.pop("name"): topic for topic in document.pop("topics")},
        "patches": {patch.pop("file"): patch for patch in document.pop("patches")},
        "releases": {
            f"{release['upstream']}+bw.{release['number']}": release["stack_id"]
            for release in document.pop("releases")
        },
        **document,
    }


def settings_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the values that differ between two documents, by the path of their keys."""
    before, after = dict(_flat("", to_plain(old))), dict(_flat("", to_plain(new)))
    keys = [*before, *(key for key in after if key not in before)]
    return tuple(
        Setting(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    )


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _flat(f"{prefix}[{_member(at, item)}]", item)
    elif value is not None:
        yield prefix, str(value)


def _member(at: int, item: Any) -> str:
    """Return what tells a member of a list from the others, wherever in the list it stands."""
    if isinstance(item, dict):
        return str(item.get("arch", at))
    return item if isinstance(item, str) else str(at)


@dataclass(frozen=True)
class _Side:
    """A stack, applied to its own release."""

    stack: Stack
    base: str
    commits: dict[str, str]
    """By patch, in order; a patch that is malformed has none."""

    @classmethod
    def applied(cls, git: Git, stack: Stack, base: str) -> _Side:
        results = own_commits(git, stack, base)
        return cls(stack, base, {result.name: result.commit for result in results if result.commit})

    def position(self, name: str | None) -> int | None:
        names = [patch.name for patch in self.stack.patches]
        return names.index(name) + 1 if name in names else None

    def subject(self, name: str) -> str:
        return next(patch.subject for patch in self.stack.patches if patch.name == name)

    def data(self, name: str) -> bytes:
        return next(patch.data for patch in self.stack.patches if patch.name == name)

    @property
    def names(self) -> list[str]:
        return [patch.name for patch in self.stack.patches]

    @property
    def range(self) -> str:
        return f"{self.base}..{[self.base, *self.commits.values()][-1]}"


@dataclass(frozen=True)
class _Series:
    """Finds what became of each patch."""

    git: Git
    old: _Side
    new: _Side

    def patches(self) -> tuple[ComparedPatch, ...]:
        origins = self._origins()
        present = tuple(self._compared(origins.get(name), name) for name in self.new.names)
        gone = [name for name in self.old.names if name not in origins.values()]
        removed = tuple(
            ComparedPatch(name, "removed", name, self.old.subject(name), self.old.position(name), None, ())
            for name in gone
        )
        return (*present, *removed)

    def _origins(self) -> dict[str, str]:
        """Return the old name of each new patch that has one: the same, or that of much the same change."""
        same = {name: name for name in self.new.names if name in self.old.names}
        left = {commit: name for name, commit in self.old.commits.items() if name not in same}
        fresh = {commit: name for name, commit in self.new.commits.items() if name not in same}
        if not left or not fresh:
            return same
        pairs = self._range_diff(self.old.range, self.new.range, "--no-patch")
        matches = (_PAIR.match(line) for line in pairs)
        renamed = {
            fresh[match[3]]: left[match[1]]
            for match in matches
            if match and match[1] in left and match[3] in fresh
        }
        return {**same, **renamed}

    def _range_diff(self, *words: str) -> list[str]:
        plain = ("--no-color", "--no-notes", "--no-ext-diff", "--no-textconv")
        said = self.git.run("range-diff", *plain, *words).stdout
        return said.decode("utf-8", "backslashreplace").split("\n")

    def _compared(self, old_name: str | None, name: str) -> ComparedPatch:
        action, difference = self._action(old_name, name)
        return ComparedPatch(
            name,
            action,
            old_name,
            self.new.subject(name),
            self.old.position(old_name),
            self.new.position(name),
            difference,
        )

    def _action(self, old_name: str | None, name: str) -> tuple[Action, tuple[str, ...]]:
        if old_name is None:
            return "added", ()
        if self.old.data(old_name) == self.new.data(name):
            return ("unchanged" if old_name == name else "renamed"), ()
        before, after = self.old.commits.get(old_name), self.new.commits.get(name)
        if before is None or after is None:
            return "changed", ()
        ranges = (f"{before}^..{before}", f"{after}^..{after}")
        # The two are one patch, however much of it changed.
        first, *rest = self._range_diff("--creation-factor=999", *ranges)
        difference = tuple(line[_INDENT:] for line in rest)[:-1]
        match = _PAIR.match(first)
        if match and match[2] == "=":
            return ("moved" if old_name == name else "renamed"), ()
        return ("changed" if old_name == name else "renamed"), difference
