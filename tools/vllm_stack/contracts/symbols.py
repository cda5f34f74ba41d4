"""What a module defines, as read from its syntax tree: small enough to keep for hundreds of modules.

Expressions (annotations, bases, values) are kept as nodes, since what they mean depends on the tree
that they are read in; statements are not kept.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

#: How a function in a class is bound: to the instance, to the class, to nothing, or read as an attribute.
Binding = Literal["function", "static", "class", "property"]


@dataclass(frozen=True, eq=False)
class Variable:
    """A name that is assigned or declared."""

    name: str
    line: int
    end_line: int
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    #: The method that assigns it, for attributes of ``self``.
    method: Function | None = None


@dataclass(frozen=True, eq=False)
class Function:
    """A function or method."""

    name: str
    line: int
    end_line: int
    arguments: ast.arguments
    annotations: Mapping[str, ast.expr]
    returns: ast.expr | None
    binding: Binding
    abstract: bool
    overload: bool
    #: Whether calls see the signature as written; false under a decorator that may change it.
    plain: bool
    decorators: tuple[str, ...]

    @cached_property
    def signature(self) -> inspect.Signature:
        """The signature without annotations, defaults shown as they are written. Few are ever asked for."""
        return read_signature(self.arguments)


@dataclass(frozen=True, eq=False)
class Class:
    """A class statement."""

    name: str
    line: int
    end_line: int
    bases: tuple[ast.expr, ...]
    metaclass: str | None
    decorators: tuple[ast.expr, ...]
    members: Mapping[str, tuple[Definition, ...]]
    #: What its methods assign to ``self``.
    attributes: Mapping[str, tuple[Variable, ...]]


@dataclass(frozen=True, eq=False)
class Import:
    """A name that an import statement binds: a module, or (``name``) something in it."""

    module: str
    name: str | None
    line: int
    end_line: int


Definition = Variable | Function | Class | Import


@dataclass(frozen=True, eq=False)
class Module:
    """A module of a tree."""

    name: str
    path: str
    bindings: Mapping[str, tuple[Definition, ...]]
    #: Modules of which all names are imported.
    stars: tuple[str, ...] = ()
    #: Names that a module-level ``__getattr__`` serves, as far as literals tell.
    lazy: frozenset[str] = field(default=frozenset())
    has_getattr: bool = False
    #: Where it lists the names it offers, with the line of each.
    exported: frozenset[str] = field(default=frozenset())
    #: Whether `hasattr`, and `:=`, may stand anywhere in it.
    asks: bool = True
    walruses: bool = True

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.path.endswith("/__init__.py") else self.name.rpartition(".")[0]


class Shown:
    """Stands for a value in a signature and is shown as the source has it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def read_signature(arguments: ast.arguments) -> inspect.Signature:
    """Turn the arguments of a syntax tree into a signature without annotations."""
    positional = [*arguments.posonlyargs, *arguments.args]
    undefaulted = len(positional) - len(arguments.defaults)
    parameters = []
    for index, argument in enumerate(positional):
        only = index < len(arguments.posonlyargs)
        kind = inspect.Parameter.POSITIONAL_ONLY if only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = arguments.defaults[index - undefaulted] if index >= undefaulted else None
        parameters.append(_parameter(argument, kind, default))
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, inspect.Parameter.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, inspect.Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, inspect.Parameter.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


def _parameter(
    argument: ast.arg, kind: inspect._ParameterKind, default: ast.expr | None
) -> inspect.Parameter:
    shown = inspect.Parameter.empty if default is None else Shown(ast.unparse(default))
    return inspect.Parameter(argument.arg, kind, default=shown)


def dotted(expression: ast.expr) -> str | None:
    """Return ``a.b.c`` for such an expression, of a call what is called; None for any other."""
    if isinstance(expression, ast.Call):
        return dotted(expression.func)
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        head = dotted(expression.value)
        return None if head is None else f"{head}.{expression.attr}"
    return None
