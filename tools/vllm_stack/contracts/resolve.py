"""What names and attributes mean in a tree, found statically: imports are followed, classes linearized.

Everything here is cautious: an answer is a value, `Missing` (in upstream's own code, and not there), or
None (outside of the tree, or decided at run time), of which nothing may be concluded.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.contracts.symbols import Class, Definition, Function, Import, Module, Variable, dotted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_stack.contracts.tree import SourceTree

#: Deepest chain of imports and aliases that is followed.
_DEPTH = 24
_ENUMS = frozenset({"Enum", "Flag", "IntEnum", "IntFlag", "StrEnum"})
#: Bases from outside that bring no attributes that a patch could mean.
_BENIGN = _ENUMS | {"ABC", "Generic", "NamedTuple", "Protocol", "object"}


@dataclass(frozen=True)
class Cause:
    """What a missing thing is missing from: the key of the contract that says so."""

    module: str
    name: str | None


@dataclass(frozen=True)
class Missing:
    """In upstream's own code, and not there."""

    cause: Cause


@dataclass(frozen=True)
class ModuleRef:
    """A module or package."""

    name: str


@dataclass(frozen=True)
class ClassRef:
    """A class, with the module that defines it."""

    module: Module
    definition: Class

    @property
    def name(self) -> str:
        """The dotted name."""
        return f"{self.module.name}.{self.definition.name}"


@dataclass(frozen=True)
class FunctionRef:
    """A function; several definitions are alternatives. ``bound`` says that its first parameter is given."""

    module: Module
    functions: tuple[Function, ...]
    owner: ClassRef | None = None
    bound: bool = False

    @property
    def name(self) -> str:
        """The dotted name."""
        prefix = self.module.name if self.owner is None else self.owner.name
        return f"{prefix}.{self.functions[0].name}"


@dataclass(frozen=True)
class InstanceRef:
    """An instance of a class; ``above`` makes it what ``super()`` gives."""

    cls: ClassRef
    above: bool = False


@dataclass(frozen=True)
class VariableRef:
    """A name of a module whose value is not followed further, or that is served by ``__getattr__``."""

    module: Module
    definition: Variable | None


Value = ModuleRef | ClassRef | FunctionRef | InstanceRef | VariableRef


@dataclass(frozen=True)
class Linearization:
    """The classes that attributes of a class come from, in order.

    ``open`` names what may add attributes that cannot be seen: bases from outside, ``__getattr__``.
    """

    classes: tuple[ClassRef, ...]
    open: frozenset[str]
    enum: bool
    missing: tuple[Cause, ...]


@dataclass(frozen=True)
class Member:
    """An attribute of a class and the class that has it."""

    owner: ClassRef
    definitions: tuple[Definition, ...]

    @property
    def function(self) -> Function | None:
        """The definition if it is a function (the last, which wins at run time)."""
        last = self.definitions[-1]
        return last if isinstance(last, Function) else None


class Resolver:
    """Follows names through the modules of one tree."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._lines: dict[tuple[str, str, int], Linearization] = {}

    def exported(self, module: str, name: str, depth: int = 0) -> Value | Missing | None:
        """Return what ``from module import name`` binds."""
        if depth > _DEPTH or not self.tree.holds(module):
            return None
        found = self.tree.module(module)
        if found is None:
            return self._without_summary(module, name)
        if name in found.bindings:
            value = self.bound(found, name, depth + 1)
            if not isinstance(value, Missing) or not self.tree.exists(f"{module}.{name}"):
                return value
        if self.tree.exists(f"{module}.{name}"):
            return ModuleRef(f"{module}.{name}")
        return self._indirect(found, name, depth)

    def _without_summary(self, module: str, name: str) -> Value | Missing | None:
        if self.tree.exists(f"{module}.{name}"):
            return ModuleRef(f"{module}.{name}")
        if self.tree.path_of(module) is not None:
            return None  # there, and not readable
        return Missing(Cause(module, name if self.tree.exists(module) else None))

    def _indirect(self, module: Module, name: str, depth: int) -> Value | Missing | None:
        opaque = False
        for star in module.stars:
            value = self.exported(star, name, depth + 1)
            if value is not None and not isinstance(value, Missing):
                return value
            opaque = opaque or value is None
        if name in module.lazy:
            return VariableRef(module, None)
        if opaque or (module.has_getattr and not module.lazy):
            return None
        return Missing(Cause(module.name, name))

    def bound(self, module: Module, name: str, depth: int = 0) -> Value | Missing | None:
        """Return what a name of a module stands for there: the first of its bindings that can be followed."""
        definitions = module.bindings.get(name)
        if definitions is None:
            return self._indirect(module, name, depth)
        functions = tuple(found for found in definitions if isinstance(found, Function))
        if functions:
            return FunctionRef(module, functions)
        values = [self._defined(module, found, depth) for found in definitions]
        followed = [value for value in values if value is not None and not isinstance(value, Missing)]
        if followed:
            concrete = [value for value in followed if not isinstance(value, VariableRef)]
            return (concrete or followed)[0]
        return next((value for value in values if value is None), values[0])

    def _defined(self, module: Module, definition: Definition, depth: int) -> Value | Missing | None:
        if isinstance(definition, Class):
            return ClassRef(module, definition)
        if isinstance(definition, Import):
            return self.imported(definition, depth + 1)
        return VariableRef(module, definition) if isinstance(definition, Variable) else None

    def imported(self, found: Import, depth: int = 0) -> Value | Missing | None:
        """Return what an import binds. What is missing is named as the import names it."""
        if found.name is not None:
            value = self.exported(found.module, found.name, depth)
            if isinstance(value, Missing) and self.tree.exists(found.module):
                return Missing(Cause(found.module, found.name))
            return value
        if not self.tree.holds(found.module):
            return None
        return (
            ModuleRef(found.module) if self.tree.exists(found.module) else Missing(Cause(found.module, None))
        )

    def named(self, module: Module, expression: ast.expr) -> Value | Missing | None:
        """Return what a plain or dotted name, or a subscript of one, stands for at the level of a module."""
        if isinstance(expression, ast.Subscript):
            return self.named(module, expression.value)
        if isinstance(expression, ast.Name):
            return self.alias(self.bound(module, expression.id))
        if isinstance(expression, ast.Attribute):
            value = self.named(module, expression.value)
            return self.alias(self.attribute(value, expression.attr)) if value is not None else None
        return None

    def alias(self, value: Value | Missing | None) -> Value | Missing | None:
        """Follow a variable that only gives something another name."""
        for _ in range(_DEPTH):
            if not isinstance(value, VariableRef) or value.definition is None:
                return value
            target = value.definition.value
            if value.definition.method is not None or not isinstance(target, (ast.Name, ast.Attribute)):
                return value
            followed = self.named(value.module, target)
            if followed is None or isinstance(followed, Missing):
                return value
            value = followed
        return value

    def attribute(self, value: Value | Missing | None, name: str) -> Value | Missing | None:
        """Return an attribute of a module or a class, without any inference of types."""
        if isinstance(value, ModuleRef):
            return self.exported(value.name, name)
        if isinstance(value, ClassRef):
            member = self.member(value, name)
            return None if member is None else self._of_class(value, member)
        return value if isinstance(value, Missing) else None

    @staticmethod
    def _of_class(owner: ClassRef, member: Member) -> Value | None:
        found = member.definitions[-1]
        if isinstance(found, Class):
            return ClassRef(member.owner.module, found)
        if isinstance(found, Function):
            functions = tuple(item for item in member.definitions if isinstance(item, Function))
            return FunctionRef(member.owner.module, functions, member.owner, found.binding == "class")
        return InstanceRef(owner) if isinstance(found, Variable) and found.method is None else None

    # -- classes ---------------------------------------------------------------------------------------

    def linearize(self, cls: ClassRef) -> Linearization:
        """Return the classes that attributes of ``cls`` come from, itself first (C3, like Python)."""
        key = (cls.module.path, cls.definition.name, cls.definition.line)
        if key not in self._lines:
            self._lines[key] = Linearization((cls,), frozenset({"a cycle of bases"}), enum=False, missing=())
            self._lines[key] = self._linearized(cls)
        return self._lines[key]

    def _linearized(self, cls: ClassRef) -> Linearization:
        opened: set[str] = set()
        missing: list[Cause] = []
        enum = False
        parents: list[Linearization] = []
        for base in cls.definition.bases:
            value = self.named(cls.module, base)
            if isinstance(value, ClassRef):
                parents.append(self.linearize(value))
            elif isinstance(value, Missing):
                missing.append(value.cause)
            else:
                name = (dotted(base.value if isinstance(base, ast.Subscript) else base) or "?").rpartition(
                    "."
                )[2]
                enum = enum or name in _ENUMS
                opened |= set() if name in _BENIGN else {ast.unparse(base)}
        if "__getattr__" in cls.definition.members or "__getattribute__" in cls.definition.members:
            opened.add(f"{cls.name}.__getattr__")
        return Linearization(
            (cls, *_merge([*(parent.classes for parent in parents), tuple(p.classes[0] for p in parents)])),
            frozenset(opened.union(*(parent.open for parent in parents))),
            enum or any(parent.enum for parent in parents),
            (*missing, *(cause for parent in parents for cause in parent.missing)),
        )

    def member(
        self,
        cls: ClassRef,
        name: str,
        *,
        above: bool = False,
        where: Callable[[Definition], bool] | None = None,
    ) -> Member | None:
        """Return the attribute ``name`` of a class or of its instances (``above``: of its bases)."""
        for owner in self.linearize(cls).classes[1 if above else 0 :]:
            found = (*owner.definition.attributes.get(name, ()), *owner.definition.members.get(name, ()))
            kept = tuple(item for item in found if where is None or where(item))
            if kept:
                return Member(owner, kept)
        return None

    def abstract_names(self, cls: ClassRef) -> Iterator[tuple[str, ClassRef]]:
        """Yield the abstract methods that neither ``cls`` nor a base of it implements, with their class."""
        seen: set[str] = set()
        for owner in self.linearize(cls).classes:
            for name, definitions in owner.definition.members.items():
                last = definitions[-1]
                if name not in seen and isinstance(last, Function) and last.abstract:
                    yield name, owner
                seen.add(name)


def _merge(lines: list[tuple[ClassRef, ...]]) -> tuple[ClassRef, ...]:
    """Merge linearizations as C3 does; where that is impossible, in the order of appearance."""
    merged: list[ClassRef] = []
    rest = [list(line) for line in lines if line]
    while rest:
        heads = [line[0] for line in rest]
        free = [head for head in heads if not any(_same(head, item) for line in rest for item in line[1:])]
        chosen = (free or heads)[0]
        merged.append(chosen)
        rest = [[item for item in line if not _same(item, chosen)] for line in rest]
        rest = [line for line in rest if line]
    return tuple(merged)


def _same(one: ClassRef, other: ClassRef) -> bool:
    return one.definition is other.definition
