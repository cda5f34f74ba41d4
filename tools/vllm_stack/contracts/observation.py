"""One thing that a patch relies on, as it is in one tree; two trees are compared thing by thing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from vllm_stack.contracts.resolve import (
    Cause,
    ClassRef,
    FunctionRef,
    InstanceRef,
    Missing,
    ModuleRef,
    Value,
    VariableRef,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from vllm_stack.contracts.symbols import Definition, Module
    from vllm_stack.contracts.tree import SourceTree


class Status(StrEnum):
    """How a thing stands in a tree."""

    HOLDS = "holds"
    ABSENT = "absent"
    BLOCKED = "blocked"
    """It hangs on something that is absent."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Site:
    """Where something is defined in a tree."""

    path: str
    line: int
    end_line: int


@dataclass(frozen=True)
class Observation:
    """One thing in one tree."""

    key: Hashable
    """The same for the same place of the patch's code in every tree."""
    status: Status
    line: int
    """In the file of the patch."""
    contract: str = ""
    """What is relied on, in words that are the same for every patch that relies on it."""
    expected: str = ""
    found: str = ""
    site: Site | None = None
    """Where it is defined; of a name that a module imports from elsewhere, the import."""
    home: Site | None = None
    """Where the thing itself is defined, behind all imports."""
    name: str = ""
    """What to look for elsewhere when it is gone: the name of a class, function or variable."""
    form: str = ""
    cause: Cause | None = None
    open: frozenset[str] = field(default=frozenset())
    """What could add attributes that are not seen."""
    problems: frozenset[str] = field(default=frozenset())
    """What does not fit; what did not fit on the old release is no finding."""
    cls: str = ""
    """The class that an attribute was looked for in, without its module."""
    bases: frozenset[str] = field(default=frozenset())
    """The names of its bases, direct or not."""
    sites: Mapping[str, Site] = field(default_factory=dict)
    """Where what a problem may be about is defined, by the first word of the problem."""


def breaks(old: Observation, new: Observation) -> str | None:
    """Say what is found instead where ``new`` no longer gives what ``old`` did; None where it does."""
    if old.status is not Status.HOLDS:
        return None
    if new.status is Status.ABSENT:
        # An annotation that now names a base of the class says less than before, not that less is there.
        widened = new.cls != old.cls and new.cls in old.bases
        return new.found if new.open <= old.open and not widened else None
    if new.status is not Status.HOLDS:
        return None
    if old.form == "class" and new.form in ("function", "variable"):
        return f"it is no longer a class but a {new.form}"
    worse = sorted(new.problems - old.problems)
    return "; ".join([*worse, *([new.found] if new.found else [])]) if worse else None


def form_of(value: Value | Missing | None) -> str:
    """Return the kind of a value in a word."""
    words = {ClassRef: "class", FunctionRef: "function", ModuleRef: "module", VariableRef: "variable"}
    return words.get(type(value), "")


def site_of(value: Value | Missing | None, tree: SourceTree) -> Site | None:
    """Return where a value is defined."""
    if isinstance(value, ModuleRef):
        path = tree.path_of(value.name)
        return None if path is None else Site(path, 1, 0)
    if isinstance(value, FunctionRef):
        return definition_site(value.module, value.functions[-1])
    if isinstance(value, InstanceRef):
        return definition_site(value.cls.module, value.cls.definition)
    if isinstance(value, (ClassRef, VariableRef)) and value.definition is not None:
        return definition_site(value.module, value.definition)
    return None


def definition_site(module: Module, definition: Definition) -> Site:
    """Return where a definition stands."""
    return Site(module.path, definition.line, definition.end_line)
