"""Contracts that people write: ``[[patches.contracts]]`` in ``series.toml``.

Derived contracts cover what a patch imports, overrides, reads and calls. Written ones are for what no
reference shows: a list that a patch appends to, a branch that has to be there, a name that must still be
free. Each names a module by its dotted name (``docs.gen`` is ``docs/gen.py``) and says when it has to
hold: in the tree after the patch, which is the default, or in the one before it.
"""

from __future__ import annotations

import ast
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from vllm_stack.contracts.symbols import read_signature
from vllm_stack.tomlfile import Strict

Dotted = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


class _Contract(Strict):
    """What all kinds have."""

    why: str | None = Field(default=None, description="what the patch does with it")
    when: Literal["before", "after"] = Field(
        default="after", description="in which tree it holds: before the patch, or after it"
    )


class _InModule(_Contract):
    module: Dotted


class FunctionContract(_InModule):
    """A function, or with ``Class.method`` a method, is there.

    ``signature`` is the whole parameter list as Python writes it; of a default only counts that there is
    one, so ``=...`` will do. ``accepts`` is a call's argument list that must fit, such as ``(_, _, key=_)``.
    The first parameter of a method is part of ``signature`` and not of ``accepts``.
    """

    kind: Literal["function"]
    name: Dotted
    signature: str | None = None
    accepts: str | None = None

    @field_validator("signature")
    @classmethod
    def _parameters(cls, value: str | None) -> str | None:
        if value is not None:
            parse_parameters(value)
        return value

    @field_validator("accepts")
    @classmethod
    def _arguments(cls, value: str | None) -> str | None:
        if value is not None:
            parse_call(value)
        return value


class ClassContract(_InModule):
    """A class is there and has these bases (direct or not), methods and attributes.

    A base is named by its last part. A method is a name, or a name with its parameter list.
    """

    kind: Literal["class"]
    name: Dotted
    bases: tuple[Dotted, ...] = ()
    methods: tuple[str, ...] = ()
    attributes: tuple[Dotted, ...] = ()

    @field_validator("methods")
    @classmethod
    def _methods(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for method in value:
            name, parenthesis, rest = method.partition("(")
            if not name.isidentifier():
                raise ValueError(f"not a method: {method}")
            if parenthesis:
                parse_parameters(f"({rest}")
        return value


class EnumContract(_InModule):
    """An enum is there, has the members of ``members`` and none of ``lacks``."""

    kind: Literal["enum"]
    name: Dotted
    members: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> EnumContract:
        if not self.members and not self.lacks:
            raise ValueError("give members, lacks or both")
        return self


class _InFunction(_InModule):
    """A place inside a function.

    ``branch`` lists conditions from the outside in: each must be that of an ``if`` (``elif``, ``while``)
    around the place, ``else CONDITION`` stands for the other branch of it. Conditions in between may be
    left out. They are compared as Python would write them, so that quotes and brackets do not matter.
    """

    function: Dotted
    branch: tuple[str, ...] = ()

    @field_validator("branch")
    @classmethod
    def _conditions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for condition in value:
            normal(condition.removeprefix("else "))
        return value


class CallContract(_InFunction):
    """A call stands in a function, where ``branch`` says; it passes at least the ``arguments``.

    An argument is an expression, which must be passed by position, or ``name=expression``.
    """

    kind: Literal["call"]
    callee: Dotted
    arguments: tuple[str, ...] = ()

    @field_validator("arguments")
    @classmethod
    def _arguments(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_call(f"({', '.join(value)})")
        return value


class ExpressionContract(_InFunction):
    """An expression stands in a function, where ``branch`` says, such as an element of a list."""

    kind: Literal["expression"]
    contains: str

    @field_validator("contains")
    @classmethod
    def _expression(cls, value: str) -> str:
        return normal(value)


class NameContract(_InModule):
    """A module defines a name (or, with ``absent``, does not)."""

    kind: Literal["name"]
    name: Dotted
    absent: bool = False


class FileContract(_Contract):
    """A file is there (or, with ``absent``, is not)."""

    kind: Literal["file"]
    path: str
    absent: bool = False

    @field_validator("path")
    @classmethod
    def _relative(cls, value: str) -> str:
        if value.startswith("/") or not {"", ".", ".."}.isdisjoint(value.split("/")):
            raise ValueError("must be a path below the root of the tree")
        return value


Contract = Annotated[
    FunctionContract
    | ClassContract
    | EnumContract
    | CallContract
    | ExpressionContract
    | NameContract
    | FileContract,
    Field(discriminator="kind"),
]


def normal(text: str) -> str:
    """Return an expression as Python writes it. ValueError when it is none."""
    try:
        return ast.unparse(ast.parse(text.strip(), mode="eval"))
    except SyntaxError as error:
        raise ValueError(f"not an expression: {text!r}") from error


def parse_parameters(text: str) -> ast.arguments:
    """Read a parameter list in brackets. ValueError when it is none."""
    try:
        function = ast.parse(f"def _{text}: ...").body[0]
    except SyntaxError as error:
        raise ValueError(f"not a parameter list: {text!r}") from error
    if not text.startswith("(") or not isinstance(function, ast.FunctionDef):
        raise ValueError(f"not a parameter list: {text!r}")
    read_signature(function.args)
    return function.args


def parse_call(text: str) -> ast.Call:
    """Read an argument list in brackets. ValueError when it is none."""
    try:
        call = ast.parse(f"_{text}", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not an argument list: {text!r}") from error
    if not text.startswith("(") or not isinstance(call, ast.Call):
        raise ValueError(f"not an argument list: {text!r}")
    return call
