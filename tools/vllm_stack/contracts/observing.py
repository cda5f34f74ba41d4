"""Looking up, in one tree, the things that code relies on: names, attributes, calls, overrides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_stack.contracts.observation import Observation, Site, Status, definition_site, form_of, site_of
from vllm_stack.contracts.resolve import (
    Cause,
    ClassRef,
    FunctionRef,
    InstanceRef,
    Missing,
    ModuleRef,
    Value,
)
from vllm_stack.contracts.signatures import Arguments, override_problems, signatures_of
from vllm_stack.contracts.symbols import Definition, Function, Import, Variable

if TYPE_CHECKING:
    from collections.abc import Hashable

    from vllm_stack.contracts.infer import Inference
    from vllm_stack.contracts.resolve import Member


class Observer:
    """Makes observations in one tree."""

    def __init__(self, inference: Inference) -> None:
        self.inference = inference
        self.resolver = inference.resolver
        self.tree = inference.resolver.tree

    # -- names -----------------------------------------------------------------------------------------

    def module(self, name: str, line: int) -> Observation:
        """Observe that a module is there."""
        key = ("module", name)
        contract = f"module {name} exists"
        if not self.tree.holds(name):
            return Observation(key, Status.UNKNOWN, line, contract)
        if self.tree.exists(name):
            site = site_of(ModuleRef(name), self.tree)
            return Observation(
                key, Status.HOLDS, line, contract, f"a module {name}", site=site, form="module"
            )
        return Observation(key, Status.ABSENT, line, contract, found="there is no such module")

    def defined(self, found: Import, line: int) -> Observation:
        """Observe that a module defines what is imported from it."""
        assert found.name is not None  # noqa: S101 - imports of modules are observed as modules
        value = self.resolver.exported(found.module, found.name)
        return self._name(("name", found.module, found.name), found.module, found.name, value, line)

    def attribute_of_module(self, key: Hashable, module: str, name: str, line: int) -> Observation:
        """Observe that a module has an attribute."""
        return self._name(key, module, name, self.resolver.exported(module, name), line)

    def _name(
        self, key: Hashable, module: str, name: str, value: Value | Missing | None, line: int
    ) -> Observation:
        contract = f"{module} defines {name}"
        if value is None:
            return Observation(key, Status.UNKNOWN, line, contract)
        if isinstance(value, Missing):
            if value.cause != Cause(module, name):
                return self.blocked(key, line, value.cause, name)
            path = self.tree.path_of(module)
            found = f"there is no {name} in {path or module}"
            return Observation(key, Status.ABSENT, line, contract, found=found, name=name)
        value = self.resolver.alias(value)
        home, form = site_of(value, self.tree), form_of(value)
        expected = f"{form or 'name'} {name} in {module}"
        return Observation(
            key,
            Status.HOLDS,
            line,
            contract,
            expected,
            site=self._binding(module, name) or home,
            home=home,
            name=name,
            form=form,
        )

    def _binding(self, module: str, name: str) -> Site | None:
        """Return where a module itself binds a name, be it by an import."""
        found = self.tree.module(module)
        definitions = found.bindings.get(name) if found is not None else None
        return definition_site(found, definitions[-1]) if found is not None and definitions else None

    def blocked(self, key: Hashable, line: int, cause: Cause, name: str = "") -> Observation:
        """Observe that something hangs on a thing that is absent."""
        return Observation(key, Status.BLOCKED, line, cause=cause, name=name)

    # -- classes ---------------------------------------------------------------------------------------

    def attribute(self, key: Hashable, value: ClassRef | InstanceRef, name: str, line: int) -> Observation:
        """Observe that a class, or its instances, have an attribute."""
        cls = value.cls if isinstance(value, InstanceRef) else value
        member = self.inference.member(value, name)
        if member is None:
            where = f"{cls.definition.name} in {cls.module.path}:{cls.definition.line}"
            return self._absent(key, cls, f"neither {where} nor a base of it has {name}", line)
        what, contract = _describe(member, name)
        observed = self._member(key, member, contract, f"{what} {name} of {member.owner.name}", line)
        bases = {base.definition.name for base in self.resolver.linearize(cls).classes[1:]}
        return replace(observed, cls=cls.definition.name, bases=frozenset(bases))

    def _absent(self, key: Hashable, cls: ClassRef, found: str, line: int) -> Observation:
        linearized = self.resolver.linearize(cls)
        if linearized.missing:
            return self.blocked(key, line, linearized.missing[0])
        name = cls.definition.name
        return Observation(key, Status.ABSENT, line, found=found, open=linearized.open, cls=name)

    def _member(self, key: Hashable, member: Member, contract: str, expected: str, line: int) -> Observation:
        cls = member.owner
        site = definition_site(cls.module, _main(member))
        opened = self.resolver.linearize(cls).open
        return Observation(key, Status.HOLDS, line, contract, expected, site=site, open=opened)

    def override(self, key: Hashable, cls: ClassRef, own: Function, line: int) -> Observation:
        """Observe that a base has a method that ``own`` overrides, and that its callers fit ``own``."""
        member = self.resolver.member(
            cls, own.name, above=True, where=lambda item: isinstance(item, Function)
        )
        if member is None:
            return self._absent(key, cls, f"no base of {cls.definition.name} has a method {own.name}", line)
        base = member.definitions[-1]
        assert isinstance(base, Function)  # noqa: S101 - `where` lets nothing else through
        text = f"class {member.owner.name} has method {own.name}{base.signature} to override"
        observed = self._member(key, member, text, f"{own.name}{base.signature} in {member.owner.name}", line)
        return _with_problems(observed, override_problems(base, own), f"it is now {own.name}{base.signature}")

    def declared(self, key: Hashable, cls: ClassRef, name: str, line: int) -> Observation:
        """Observe that a base knows an attribute that ``cls`` sets."""
        member = self.resolver.member(cls, name, above=True)
        if member is None:
            return self._absent(key, cls, f"no base of {cls.definition.name} declares {name}", line)
        contract = f"class {member.owner.name} declares {name}, which {cls.definition.name} sets"
        return self._member(key, member, contract, f"a declaration of {name} in {member.owner.name}", line)

    def abstract(self, key: Hashable, cls: ClassRef, line: int) -> Observation:
        """Observe that a class implements what its bases leave abstract."""
        linearized = self.resolver.linearize(cls)
        if linearized.missing:
            return self.blocked(key, line, linearized.missing[0])
        if len(linearized.classes) == 1:
            return Observation(key, Status.UNKNOWN, line)
        lacking = list(self.resolver.abstract_names(cls))
        problems = {f"{name} of {owner.name} is abstract and not implemented" for name, owner in lacking}
        sites = {
            name: definition_site(owner.module, definitions[-1])
            for owner in reversed(linearized.classes[1:])
            for name, definitions in owner.definition.members.items()
        }
        return Observation(
            key,
            Status.HOLDS,
            line,
            f"{cls.name} implements every abstract method of its bases",
            "no other abstract methods than on the pin",
            problems=frozenset(problems),
            sites=sites,
        )

    # -- calls -----------------------------------------------------------------------------------------

    def call(self, key: Hashable, value: Value, arguments: Arguments, line: int) -> Observation:
        """Observe that what is called takes the arguments."""
        signatures = signatures_of(value, self.resolver)
        if not signatures or not isinstance(value, (FunctionRef, ClassRef)):
            return Observation(key, Status.UNKNOWN, line)
        problems = [arguments.problem(signature) for signature in signatures]
        fits = None in problems
        shown = " or ".join(map(str, signatures))
        contract = f"{value.name} accepts {arguments}"
        observed = Observation(
            key,
            Status.HOLDS,
            line,
            contract,
            f"a signature that {arguments} fits; on the pin {shown}",
            site=site_of(value, self.tree),
            form=form_of(value),
        )
        said = frozenset() if fits else frozenset({problems[0] or ""})
        return _with_problems(observed, said, f"the signature is now {shown}")


def _main(member: Member) -> Definition:
    for item in member.definitions:
        if isinstance(item, Variable) and item.annotation is not None:
            return item
    return member.definitions[-1]


def _describe(member: Member, name: str) -> tuple[str, str]:
    function = member.function
    if function is None or function.binding == "property":
        kind = "attribute" if function is None else "property"
        return kind, f"class {member.owner.name} has attribute {name}"
    return "method", f"class {member.owner.name} has method {name}{function.signature}"


def _with_problems(observed: Observation, problems: frozenset[str], found: str) -> Observation:
    return replace(observed, problems=problems, found=found) if problems else observed
