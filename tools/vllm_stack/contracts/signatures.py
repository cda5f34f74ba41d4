"""Whether a call fits a signature, whether an override fits its base, and what constructors take."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.contracts.resolve import ClassRef, FunctionRef, Resolver
from vllm_stack.contracts.symbols import Class, Function, Shown, Variable, dotted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_METACLASSES = ("ABCMeta", "abc.ABCMeta")


@dataclass(frozen=True)
class Arguments:
    """What a call passes: how many by position, which by keyword, and whether ``*`` or ``**`` add some."""

    positional: int
    keywords: tuple[str, ...]
    more_positional: bool = False
    more_keywords: bool = False

    @classmethod
    def of(cls, call: ast.Call) -> Arguments:
        """Read the arguments of a call."""
        starred = [isinstance(argument, ast.Starred) for argument in call.args]
        return cls(
            starred.count(False) if True not in starred else starred.index(True),
            tuple(word.arg for word in call.keywords if word.arg is not None),
            True in starred,
            any(word.arg is None for word in call.keywords),
        )

    def __str__(self) -> str:
        parts = [*["_"] * self.positional, *(["*_"] if self.more_positional else [])]
        parts += [f"{name}=_" for name in self.keywords]
        return f"({', '.join([*parts, *(['**_'] if self.more_keywords else [])])})"

    def problem(self, signature: inspect.Signature) -> str | None:
        """Say why the call does not fit a signature; None when it does."""
        values = [None] * self.positional
        words = dict.fromkeys(self.keywords)
        try:
            if self.more_positional or self.more_keywords:
                signature.bind_partial(*values, **words)
            else:
                signature.bind(*values, **words)
        except TypeError as error:
            return str(error)
        return None


def without_first(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature as a bound method has it."""
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[1:]
    return inspect.Signature(parameters)


def signatures_of(value: object, resolver: Resolver) -> tuple[inspect.Signature, ...]:
    """Return the signatures that a call of ``value`` may follow; none when they cannot be told."""
    if isinstance(value, FunctionRef):
        functions = [found for found in value.functions if not found.overload] or list(value.functions)
        if not all(found.plain and found.binding != "property" for found in functions):
            return ()
        return tuple(without_first(f.signature) if value.bound else f.signature for f in functions)
    return _constructor(value, resolver) if isinstance(value, ClassRef) else ()


def _constructor(cls: ClassRef, resolver: Resolver) -> tuple[inspect.Signature, ...]:
    line = resolver.linearize(cls)
    if line.enum or line.missing or any("__new__" in owner.definition.members for owner in line.classes):
        return ()
    for owner in line.classes:
        definition = owner.definition
        if definition.metaclass not in (None, *_METACLASSES):
            return ()
        if not all(_is_dataclass(decorator, owner, resolver) for decorator in definition.decorators):
            return ()
        found = definition.members.get("__init__", ())
        functions = tuple(item for item in found if isinstance(item, Function))
        if functions:
            return signatures_of(FunctionRef(owner.module, functions, owner, bound=True), resolver)
        generated = _generated(owner, resolver)
        if generated is not None:
            return (generated,)
    return () if line.open else (inspect.Signature(),)


def _is_dataclass(decorator: ast.expr, owner: ClassRef, resolver: Resolver) -> bool:
    """Say whether a class decorator generates a constructor from the fields, as `dataclass` does."""
    name = dotted(decorator) or ""
    if name in ("dataclass", "dataclasses.dataclass", "pydantic.dataclasses.dataclass"):
        return True
    function = resolver.named(owner.module, decorator.func if isinstance(decorator, ast.Call) else decorator)
    if not isinstance(function, FunctionRef):
        return False
    return any("dataclass_transform" in text for item in function.functions for text in item.decorators)


def _generated(cls: ClassRef, resolver: Resolver) -> inspect.Signature | None:
    """Return the signature of a generated constructor, or None for a class without one."""
    if _is_named_tuple(cls.definition):
        return _signature([_Field(item, keyword=False) for item in _fields(cls.definition)])
    if not cls.definition.decorators:
        return None
    options = _options(cls.definition.decorators[0])
    if options.get("init") == "False":
        return None
    line = resolver.linearize(cls)
    fields: dict[str, _Field] = {}
    for owner in reversed(line.classes):
        if owner.definition.decorators:
            keyword = _options(owner.definition.decorators[0]).get("kw_only") == "True"
            for item in _dataclass_fields(owner.definition, keyword=keyword):
                fields[item.variable.name] = item
    return _signature(fields.values())


def _is_named_tuple(definition: Class) -> bool:
    return any((dotted(base) or "").rpartition(".")[2] == "NamedTuple" for base in definition.bases)


def _options(decorator: ast.expr) -> dict[str, str]:
    words = decorator.keywords if isinstance(decorator, ast.Call) else []
    return {word.arg: ast.unparse(word.value) for word in words if word.arg}


@dataclass(frozen=True)
class _Field:
    """A field of a generated constructor."""

    variable: Variable
    keyword: bool

    @property
    def parameter(self) -> inspect.Parameter:
        kind = inspect.Parameter.KEYWORD_ONLY if self.keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = _default(self.variable.value)
        shown = inspect.Parameter.empty if default is None else Shown(default)
        return inspect.Parameter(self.variable.name, kind, default=shown)


def _default(value: ast.expr | None) -> str | None:
    if value is None:
        return None
    if isinstance(value, ast.Call) and (dotted(value.func) or "").rpartition(".")[2].lower() == "field":
        options = _options(value)
        given = options.get("default", options.get("default_factory"))
        if given is not None or not value.args:
            return given
        return None if ast.unparse(value.args[0]) == "..." else ast.unparse(value.args[0])
    return ast.unparse(value)


def _fields(definition: Class) -> Iterator[Variable]:
    for definitions in definition.members.values():
        last = definitions[-1]
        if (
            isinstance(last, Variable)
            and last.annotation is not None
            and not _is_class_variable(last.annotation)
        ):
            yield last


def _is_class_variable(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).strip("'\"").startswith(("ClassVar", "typing.ClassVar"))


def _dataclass_fields(definition: Class, *, keyword: bool) -> Iterator[_Field]:
    for variable in _fields(definition):
        if variable.annotation is not None and (dotted(variable.annotation) or "").endswith("KW_ONLY"):
            keyword = True
            continue
        options = _options(variable.value) if variable.value is not None else {}
        if options.get("init") != "False":
            yield _Field(variable, options.get("kw_only", str(keyword)) == "True")


def _signature(fields: Iterable[_Field]) -> inspect.Signature:
    parameters = [item.parameter for item in fields]
    positional = [item for item in parameters if item.kind is not inspect.Parameter.KEYWORD_ONLY]
    keyword = [item for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY]
    # A field without a default behind one with a default is upstream's fault, not ours to report.
    return inspect.Signature([*positional, *keyword], __validate_parameters__=False)


def override_problems(base: Function, own: Function) -> frozenset[str]:
    """Say in which ways calls that fit ``base`` do not fit ``own``, which overrides it."""
    if base.binding != own.binding:
        return frozenset({f"it is now a {_kind(base)}, the override is a {_kind(own)}"})
    if base.binding == "property" or not (base.plain and own.plain):
        return frozenset()
    given = list(_shown(base).parameters.values())
    taken = list(_shown(own).parameters.values())
    return frozenset({*_not_taken(given, taken), *_not_given(given, taken)})


def _kind(function: Function) -> str:
    words = {"function": "plain method", "static": "static method", "class": "class method"}
    return words.get(function.binding, function.binding)


def _shown(function: Function) -> inspect.Signature:
    return function.signature if function.binding == "static" else without_first(function.signature)


def _not_taken(given: Sequence[inspect.Parameter], taken: Sequence[inspect.Parameter]) -> Iterator[str]:
    """Yield what callers may pass and the override does not take."""
    by_position = [item for item in taken if item.kind in _POSITIONAL]
    kinds = {item.kind for item in taken}
    names = {item.name for item in taken if item.kind is not inspect.Parameter.POSITIONAL_ONLY}
    for index, item in enumerate(item for item in given if item.kind in _POSITIONAL):
        if index >= len(by_position):
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                yield f"parameter {item.name} is passed, and the override does not take it"
        elif by_position[index].name != item.name and item.kind is not inspect.Parameter.POSITIONAL_ONLY:
            yield f"parameter {by_position[index].name} of the override is now called {item.name}"
    for item in given:
        if item.kind is inspect.Parameter.KEYWORD_ONLY and item.name not in names:
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                yield f"keyword parameter {item.name} is passed, and the override does not take it"
        elif item.kind in _ANY and item.kind not in kinds:
            yield f"any further arguments are passed ({item}), and the override does not take them"


def _not_given(given: Sequence[inspect.Parameter], taken: Sequence[inspect.Parameter]) -> Iterator[str]:
    """Yield what the override needs and callers need not pass."""
    positional = [item for item in given if item.kind in _POSITIONAL]
    optional = {item.name for item in given if item.default is not inspect.Parameter.empty}
    names = {item.name for item in given}
    if any(item.kind in _ANY for item in given):
        return
    for index, item in enumerate(item for item in taken if item.kind in _POSITIONAL):
        if item.default is not inspect.Parameter.empty:
            continue
        if index >= len(positional) and item.name not in names:
            yield f"parameter {item.name} of the override is no longer passed"
        elif index < len(positional) and positional[index].name in optional:
            yield f"parameter {item.name} of the override has no default, its callers may leave it out"
    for item in taken:
        if item.kind is inspect.Parameter.KEYWORD_ONLY and item.default is inspect.Parameter.empty:
            if item.name not in names:
                yield f"keyword parameter {item.name} of the override is no longer passed"
            elif item.name in optional:
                yield f"keyword parameter {item.name} of the override has no default"
