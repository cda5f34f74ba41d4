"""Whether a call fits a signature, whether an override fits its base, and what constructors take."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.contracts.resolve import ClassRef, FunctionRef, Resolver
from vllm_stack.contracts.symbols import Class, Function, Shown, Variable, dotted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
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
        signature = _bindable(signature)
        try:
            if self.more_positional or self.more_keywords:
                signature.bind_partial(*values, **words)
            else:
                signature.bind(*values, **words)
        except TypeError as error:
            return str(error)
        return None


def _bindable(signature: inspect.Signature) -> inspect.Signature:
    """Take care of ``(a, /, **words)``: ``inspect`` refuses ``a`` as a keyword before Python 3.13."""
    parameters = signature.parameters.values()
    if not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters):
        return signature
    only = inspect.Parameter.POSITIONAL_ONLY
    renamed = [item.replace(name=f"{item.name}__") if item.kind is only else item for item in parameters]
    return signature.replace(parameters=renamed)


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
    given, taken = _Parameters.of(base), _Parameters.of(own)
    checks = (_by_position, _by_keyword, _any_more, _needed, _given_twice)
    return frozenset(problem for check in checks for problem in check(given, taken))


def _kind(function: Function) -> str:
    words = {"function": "plain method", "static": "static method", "class": "class method"}
    return words.get(function.binding, function.binding)


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a method as its callers see them."""

    positional: tuple[inspect.Parameter, ...]
    keyword_only: tuple[inspect.Parameter, ...]
    kinds: frozenset[inspect._ParameterKind]

    @classmethod
    def of(cls, function: Function) -> _Parameters:
        signature = function.signature if function.binding == "static" else without_first(function.signature)
        every = signature.parameters.values()
        return cls(
            tuple(item for item in every if item.kind in _POSITIONAL),
            tuple(item for item in every if item.kind is inspect.Parameter.KEYWORD_ONLY),
            frozenset(item.kind for item in every),
        )

    @property
    def keywords(self) -> frozenset[str]:
        """The names that can be passed by keyword, ``**`` aside."""
        named = (item for item in self.positional if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return frozenset(item.name for item in (*named, *self.keyword_only))

    @property
    def needed_keywords(self) -> frozenset[str]:
        """The names that have to be passed by keyword."""
        return frozenset(item.name for item in self.keyword_only if _is_needed(item))


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def _by_position(given: _Parameters, taken: _Parameters) -> Iterator[str]:
    """Yield what is passed by position, and what the override calls or takes otherwise."""
    for index, item in enumerate(given.positional):
        if index >= len(taken.positional):
            if inspect.Parameter.VAR_POSITIONAL not in taken.kinds:
                yield f"parameter {item.name} is passed, and the override does not take it"
        elif item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            own = taken.positional[index]
            if own.name != item.name:
                yield f"parameter {own.name} of the override is now called {item.name}"
            elif own.kind is inspect.Parameter.POSITIONAL_ONLY:
                yield f"parameter {own.name} is passed by keyword, and the override takes it by position"


def _by_keyword(given: _Parameters, taken: _Parameters) -> Iterator[str]:
    """Yield what is passed by keyword and not taken."""
    if inspect.Parameter.VAR_KEYWORD in taken.kinds:
        return
    beyond = given.positional[len(taken.positional) :]
    rest = [item for item in beyond if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for item in (*given.keyword_only, *rest):
        if item.name not in taken.keywords:
            yield f"keyword parameter {item.name} is passed, and the override does not take it"


def _any_more(given: _Parameters, taken: _Parameters) -> Iterator[str]:
    """Yield ``*`` and ``**`` that the override does not have."""
    for kind, shown in ((inspect.Parameter.VAR_POSITIONAL, "*"), (inspect.Parameter.VAR_KEYWORD, "**")):
        if kind in given.kinds and kind not in taken.kinds:
            yield f"any further arguments are passed ({shown}), and the override does not take them"


def _needed(given: _Parameters, taken: _Parameters) -> Iterator[str]:
    """Yield what the override needs and its callers need not pass."""
    for index, item in enumerate(taken.positional):
        if not _is_needed(item):
            continue
        if index < len(given.positional):
            if not _is_needed(given.positional[index]):
                yield f"parameter {item.name} of the override has no default, its callers may leave it out"
        elif item.kind is inspect.Parameter.POSITIONAL_ONLY or item.name not in given.needed_keywords:
            yield f"parameter {item.name} of the override is no longer passed"
    for name in sorted(taken.needed_keywords - given.needed_keywords):
        fate = "may be left out" if name in given.keywords else "is no longer passed"
        yield f"keyword parameter {name} of the override {fate}"


def _given_twice(given: _Parameters, taken: _Parameters) -> Iterator[str]:
    """Yield what the override could get by position and by keyword at once."""
    more = inspect.Parameter.VAR_POSITIONAL in given.kinds
    reached = taken.positional if more else taken.positional[: len(given.positional)]
    for index, item in enumerate(reached):
        same = index < len(given.positional) and given.positional[index].name == item.name
        if item.kind is inspect.Parameter.POSITIONAL_ONLY or (
            same and given.positional[index].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            continue
        if item.name in given.keywords or inspect.Parameter.VAR_KEYWORD in given.kinds:
            yield f"parameter {item.name} of the override may be passed by position and by keyword at once"
