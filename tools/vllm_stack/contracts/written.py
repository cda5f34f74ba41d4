"""Checking contracts that people wrote, in one tree."""

from __future__ import annotations

import ast
import difflib
import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_stack.contracts.kinds import (
    CallContract,
    ClassContract,
    EnumContract,
    ExpressionContract,
    FileContract,
    FunctionContract,
    NameContract,
    normal,
    parse_call,
    parse_parameters,
)
from vllm_stack.contracts.observation import Site, definition_site, site_of
from vllm_stack.contracts.resolve import ClassRef, FunctionRef, Missing, Resolver, Value
from vllm_stack.contracts.signatures import Arguments, signatures_of
from vllm_stack.contracts.summary import parse
from vllm_stack.contracts.symbols import Function, Variable, dotted, read_signature

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.contracts.kinds import Contract


#: Places elsewhere in a function that a message names at most.
_BRANCHES = 3
#: Several contracts are about the same few modules.
_parsed = lru_cache(maxsize=8)(parse)


@dataclass(frozen=True)
class Written:
    """How a written contract stands in a tree; ``found`` is None where it holds."""

    contract: str
    expected: str
    found: str | None
    site: Site | None = None
    gone: str = ""
    """The name that is no longer where it was, if that is what is wrong."""


class _BrokenError(Exception):
    """The contract does not hold; the message says what is found."""

    def __init__(self, message: str, gone: str = "") -> None:
        super().__init__(message)
        self.gone = gone


def check_written(contract: Contract, resolver: Resolver) -> Written:
    """Look up one contract in a tree."""
    checker = _Checker(resolver)
    text, expected = _describe(contract)
    try:
        checker.check(contract)
    except _BrokenError as broken:
        return Written(text, expected, str(broken), checker.site, broken.gone)
    return Written(text, expected, None, checker.site)


def _describe(contract: Contract) -> tuple[str, str]:  # noqa: PLR0911 - one line per kind
    match contract:
        case FunctionContract():
            shown = contract.signature or contract.accepts or ""
            verb = "accepts" if contract.accepts and not contract.signature else "is"
            return f"function {contract.module}.{contract.name} {verb} {shown}".rstrip(
                " is"
            ), shown or "is there"
        case ClassContract():
            parts = [
                ("bases", contract.bases),
                ("methods", contract.methods),
                ("attributes", contract.attributes),
            ]
            text = "; ".join(f"{word} {', '.join(items)}" for word, items in parts if items)
            return (
                f"class {contract.module}.{contract.name}{' has ' if text else ''}{text}",
                text or "is there",
            )
        case EnumContract():
            parts = [("members", contract.members), ("no member", contract.lacks)]
            text = "; ".join(f"{word} {', '.join(items)}" for word, items in parts if items)
            return f"enum {contract.module}.{contract.name} has {text}", text
        case CallContract():
            text = f"{contract.callee}({', '.join(contract.arguments) or '...'})"
            return f"{_where(contract)} calls {text}", text
        case ExpressionContract():
            return f"{_where(contract)} contains {contract.contains}", contract.contains
        case NameContract():
            verb = "does not define" if contract.absent else "defines"
            return f"{contract.module} {verb} {contract.name}", f"{verb} {contract.name}"
        case FileContract():
            state = "does not exist" if contract.absent else "exists"
            return f"file {contract.path} {state}", state


def _where(contract: CallContract | ExpressionContract) -> str:
    conditions = "".join(f", in the branch `{condition}`" for condition in contract.branch)
    return f"{contract.module}.{contract.function}{conditions}"


class _Checker:
    """Checks one contract and keeps where the thing is defined."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._tree = resolver.tree
        self.site: Site | None = None

    def check(self, contract: Contract) -> None:
        """Raise _BrokenError when the contract does not hold."""
        match contract:
            case FunctionContract():
                self._function(contract)
            case ClassContract():
                self._class(contract)
            case EnumContract():
                self._enum(contract)
            case CallContract() | ExpressionContract():
                self._place(contract)
            case NameContract():
                self._name(contract)
            case FileContract():
                self._file(contract)

    def _lookup(self, module: str, name: str) -> Value:
        """Return what a dotted name of a module is."""
        first, *rest = name.split(".")
        if self._tree.module(module) is None:
            raise _BrokenError(f"there is no module {module}", first)
        value = self._resolver.alias(self._resolver.exported(module, first))
        for part in rest:
            value = self._resolver.attribute(value, part) if isinstance(value, ClassRef) else None
        if value is None or isinstance(value, Missing):
            raise _BrokenError(f"there is no {name} in {self._tree.path_of(module)}", first)
        self.site = site_of(value, self._tree)
        return value

    def _file(self, contract: FileContract) -> None:
        there = self._tree.blob(contract.path) is not None
        if there == contract.absent:
            raise _BrokenError(f"there is {'' if there else 'no '}file {contract.path}")

    def _name(self, contract: NameContract) -> None:
        try:
            self._lookup(contract.module, contract.name)
        except _BrokenError:
            if not contract.absent:
                raise
            return
        if contract.absent:
            raise _BrokenError(f"{contract.name} is defined in {self._shown()}")

    def _shown(self) -> str:
        return "the tree" if self.site is None else f"{self.site.path}:{self.site.line}"

    def _function(self, contract: FunctionContract) -> None:
        value = self._lookup(contract.module, contract.name)
        if not isinstance(value, FunctionRef):
            raise _BrokenError(f"{contract.name} in {self._shown()} is not a function")
        function = value.functions[-1]
        if contract.signature is not None:
            self._same(contract.signature, function)
        if contract.accepts is not None:
            bound = FunctionRef(value.module, value.functions, value.owner, _has_self(value, function))
            arguments = Arguments.of(parse_call(contract.accepts))
            signatures = signatures_of(bound, self._resolver) or (function.signature,)
            problems = [arguments.problem(signature) for signature in signatures]
            if None not in problems:
                raise _BrokenError(f"{problems[0]}; the signature is now {function.signature}")

    def _same(self, text: str, function: Function) -> None:
        wanted = read_signature(parse_parameters(text))
        if _form(wanted) != _form(function.signature):
            raise _BrokenError(
                f"{_difference(wanted, function.signature)}the signature is {function.signature}"
            )

    def _class(self, contract: ClassContract) -> None:
        cls = self._class_of(contract)
        line = self._resolver.linearize(cls)
        names = {owner.definition.name for owner in line.classes[1:]} | line.open
        names |= {dotted(base) or "" for owner in line.classes for base in owner.definition.bases}
        last = {name.rpartition(".")[2] for name in names}
        for base in contract.bases:
            if base.rpartition(".")[2] not in last:
                raise _BrokenError(f"{base} is no base of {contract.name} in {self._shown()}")
        for method in contract.methods:
            self._method(cls, method)
        for attribute in contract.attributes:
            if self._resolver.member(cls, attribute) is None:
                raise _BrokenError(f"{contract.name} in {self._shown()} has no attribute {attribute}")

    def _class_of(self, contract: ClassContract | EnumContract) -> ClassRef:
        value = self._lookup(contract.module, contract.name)
        if not isinstance(value, ClassRef):
            raise _BrokenError(f"{contract.name} in {self._shown()} is not a class")
        return value

    def _method(self, cls: ClassRef, text: str) -> None:
        name, parenthesis, rest = text.partition("(")
        member = self._resolver.member(cls, name)
        function = None if member is None else member.function
        if member is None or function is None:
            raise _BrokenError(f"{cls.definition.name} in {self._shown()} has no method {name}")
        self.site = definition_site(member.owner.module, function)
        if parenthesis:
            self._same(f"({rest}", function)

    def _enum(self, contract: EnumContract) -> None:
        cls = self._class_of(contract)
        if not self._resolver.linearize(cls).enum:
            raise _BrokenError(f"{contract.name} in {self._shown()} is not an enum")
        found = cls.definition.members
        members = {name for name, items in found.items() if isinstance(items[-1], Variable)}
        for name in contract.members:
            if name not in members:
                raise _BrokenError(f"{contract.name} in {self._shown()} has no member {name}")
        for name in contract.lacks:
            if name in members:
                self.site = definition_site(cls.module, found[name][-1])
                raise _BrokenError(f"{contract.name} has a member {name} ({self._shown()})")

    def _place(self, contract: CallContract | ExpressionContract) -> None:
        self._lookup(contract.module, contract.function.partition(".")[0])
        path = self._tree.path_of(contract.module) or ""
        node = _find_function(_parsed(self._tree.text(path) or b""), contract.function)
        if node is None:
            raise _BrokenError(f"there is no function {contract.function} in {path}")
        self.site = Site(path, node.lineno, node.end_lineno or node.lineno)
        wanted = [_condition(text) for text in contract.branch]
        nodes = list(_nodes(node.body, ()))
        fitting = [(found, branch) for found, branch in nodes if _matches(contract, found)]
        there = next((found for found, branch in fitting if _is_within(wanted, branch)), None)
        if isinstance(there, ast.expr):
            self.site = Site(path, there.lineno, there.end_lineno or there.lineno)
        else:
            branches = [branch for _, branch in fitting]
            conditions = {condition for _, branch in nodes for condition in branch}
            calls = [ast.unparse(found) for found, _ in nodes if _is_call(contract, found)]
            said = self._astray(contract, wanted, branches, conditions)
            raise _BrokenError("; ".join([*said, *(f"there is {call}" for call in calls[:_BRANCHES])]))

    def _astray(
        self,
        contract: CallContract | ExpressionContract,
        wanted: list[str],
        branches: list[tuple[str, ...]],
        conditions: set[str],
    ) -> list[str]:
        """Say what is there instead: the place elsewhere, or a condition that was rewritten."""
        what = contract.callee if isinstance(contract, CallContract) else contract.contains
        said = [f"{what} is not there in {contract.function} ({self._shown()})"]
        for condition in wanted:
            if condition not in conditions:
                similar = difflib.get_close_matches(condition, conditions, 1)
                said.append(f"no branch `{condition}`" + (f", but one `{similar[0]}`" if similar else ""))
        shown = sorted({" > ".join(branch) or "no condition" for branch in branches})[:_BRANCHES]
        return [*said, *(f"it stands under: {branch}" for branch in shown)]


def _has_self(value: FunctionRef, function: Function) -> bool:
    return value.bound or (value.owner is not None and function.binding == "function")


def _form(signature: inspect.Signature) -> list[tuple[str, object, bool]]:
    return [
        (item.name, item.kind, item.default is inspect.Parameter.empty)
        for item in signature.parameters.values()
    ]


def _difference(wanted: inspect.Signature, found: inspect.Signature) -> str:
    gone = [name for name in wanted.parameters if name not in found.parameters]
    new = [name for name in found.parameters if name not in wanted.parameters]
    parts = [f"parameter {name} is gone" for name in gone] + [f"parameter {name} is new" for name in new]
    return "; ".join([*parts, ""])


def _find_function(tree: ast.Module | None, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    found: ast.AST | None = tree
    for part in name.split("."):
        named = (
            node
            for node in (ast.walk(found) if found is not None else ())
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == part
        )
        found = next((node for node in named if node is not found), None)
    return found if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _condition(text: str) -> str:
    return f"else {normal(text[5:])}" if text.startswith("else ") else normal(text)


def _nodes(body: list[ast.stmt], branch: tuple[str, ...]) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Yield every node of a function with the conditions around it."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.While)):
            condition = ast.unparse(statement.test)
            yield from ((node, branch) for node in ast.walk(statement.test))
            yield from _nodes(statement.body, (*branch, condition))
            yield from _nodes(statement.orelse, (*branch, f"else {condition}"))
            continue
        nested = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        nested += [handler.body for handler in getattr(statement, "handlers", [])]
        inside = {id(item) for block in nested if isinstance(block, list) for item in block}
        yield from ((node, branch) for node in _walk_outside(statement, inside))
        for block in nested:
            yield from _nodes(block, branch)


def _walk_outside(node: ast.AST, inside: set[int]) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if id(child) not in inside:
            yield from _walk_outside(child, inside)


def _is_call(contract: CallContract | ExpressionContract, node: ast.AST) -> bool:
    """Say whether a node is a call of what a contract says is called, with whatever arguments."""
    if not isinstance(contract, CallContract) or not isinstance(node, ast.Call):
        return False
    return dotted(node.func) == contract.callee


def _matches(contract: CallContract | ExpressionContract, node: ast.AST) -> bool:
    if not isinstance(node, ast.expr):
        return False
    if isinstance(contract, ExpressionContract):
        return ast.unparse(node) == contract.contains
    if not isinstance(node, ast.Call) or not _is_call(contract, node):
        return False
    call = parse_call(f"({', '.join(contract.arguments)})")
    given = {ast.unparse(argument) for argument in node.args}
    words = {word.arg: ast.unparse(word.value) for word in node.keywords}
    return all(ast.unparse(argument) in given for argument in call.args) and all(
        words.get(word.arg) == ast.unparse(word.value) for word in call.keywords
    )


def _is_within(wanted: list[str], branch: tuple[str, ...]) -> bool:
    """Say whether the wanted conditions occur in the branch, in this order."""
    rest = iter(branch)
    return all(condition in rest for condition in wanted)
