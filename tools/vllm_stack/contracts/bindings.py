"""Which names the functions and classes of a file bind, by Python's own rules of scope."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vllm_stack.contracts.visiting import Visitor, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Form = Literal["parameter", "variable", "import", "definition"]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Binding:
    """A place that binds a name in a function."""

    name: str
    form: Form
    line: int
    end_line: int


@dataclass
class Scope:
    """A function or a class body, as far as names go."""

    name: str
    parent: Scope | None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    #: Names that `global` or `nonlocal` make those of another scope.
    outward: dict[str, Literal["global", "nonlocal"]] = field(default_factory=dict)
    #: Names that functions inside it bind, whenever they are called.
    shared: frozenset[str] = frozenset()

    def owns(self, name: str) -> bool:
        """Say whether a name is one of this very scope."""
        return name in self.bindings and name not in self.outward

    def lookup(self, name: str) -> frozenset[Binding] | None:
        """Return what binds a name here or in a function around; None for a name of the module."""
        if self.outward.get(name) == "global":
            return None
        if self.owns(name):
            return frozenset(self.bindings[name])
        return self.lookup_around(name)

    def lookup_around(self, name: str) -> frozenset[Binding] | None:
        """Return what binds a name in a function around; class bodies are not seen from inside."""
        around = self.parent
        while around is not None and around.is_class:
            around = around.parent
        return None if around is None else around.lookup(name)


class Binder(Visitor, ast.NodeVisitor):
    """Tells `bind` of each name that the code of a scope binds; what is inside other scopes is left out."""

    def bind(self, name: str, form: Form, node: ast.AST) -> None:
        """Take note of a name; ``node`` is where it is bound."""
        raise NotImplementedError

    def declare(self, name: str) -> None:
        """Take note of a name that belongs to the scope and is not bound here."""

    def visit_Name(self, node: ast.Name) -> None:
        """Bind the targets of assignments, loops, `with` and `:=`."""
        if isinstance(node.ctx, ast.Store):
            self.bind(node.id, "variable", node)
        elif isinstance(node.ctx, ast.Del):
            self.declare(node.id)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Bind the target if there is a value. Annotations of local names are not evaluated."""
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        elif isinstance(node.target, ast.Name):
            self.declare(node.target.id)
        else:
            self.visit(node.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Bind what is imported."""
        for alias in node.names:
            if alias.name != "*":
                whole = isinstance(node, ast.ImportFrom)
                name = alias.asname or (alias.name if whole else alias.name.partition(".")[0])
                self.bind(name, "import", alias)

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_FunctionDef(self, node: FunctionNode) -> None:
        """Bind its name; its defaults and decorators are evaluated here."""
        defaults = (*node.args.defaults, *(item for item in node.args.kw_defaults if item is not None))
        for expression in (*node.decorator_list, *defaults):
            self.visit(expression)
        self.bind(node.name, "definition", node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Bind its name; its bases and decorators are evaluated here."""
        parameters = {item.name for item in getattr(node, "type_params", ())}
        if not parameters:
            for expression in (*node.decorator_list, *node.bases, *(word.value for word in node.keywords)):
                self.visit(expression)
        self.bind(node.name, "definition", node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Bind the name of the exception."""
        if node.name:
            self.bind(node.name, "variable", node)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        """Bind what a pattern captures."""
        self.generic_visit(node)
        if node.name:
            self.bind(node.name, "variable", node)

    visit_MatchStar = visit_MatchAs  # noqa: N815

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        """Bind the rest of a mapping."""
        self.generic_visit(node)
        if node.rest:
            self.bind(node.rest, "variable", node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Only its defaults are evaluated here."""
        for expression in (
            *node.args.defaults,
            *(item for item in node.args.kw_defaults if item is not None),
        ):
            self.visit(expression)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Its targets belong to it; what `:=` in it binds does not."""
        for expression in (node.iter, *node.ifs):
            self.visit(expression)

    def visit_TypeAlias(self, node: ast.AST) -> None:
        """Bind the name of a `type` statement (Python 3.12); its value is evaluated later, if ever."""
        self.visit(node.name)  # type: ignore[attr-defined]


class Collector(Binder):
    """Fills a scope with what it binds anywhere."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def bind(self, name: str, form: Form, node: ast.AST) -> None:
        """Take note of a name; ``node`` is where it is bound."""
        self._scope.bindings.setdefault(name, []).append(binding(name, form, node))

    def declare(self, name: str) -> None:
        """Take note of a name that belongs to the scope and is not bound here."""
        self._scope.bindings.setdefault(name, [])

    def visit_Global(self, node: ast.Global) -> None:
        """Take names out of the scope."""
        self._scope.outward.update(dict.fromkeys(node.names, "global"))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        """Take names out of the scope."""
        self._scope.outward.update(dict.fromkeys(node.names, "nonlocal"))


def binding(name: str, form: Form, node: ast.AST) -> Binding:
    """Make a binding; of a function or class only the line with its name counts."""
    line = getattr(node, "lineno", 0)
    whole = isinstance(node, (ast.Name, ast.arg, ast.alias))
    return Binding(name, form, line, getattr(node, "end_lineno", line) if whole else line)


def parameters(arguments: ast.arguments) -> Iterator[ast.arg]:
    """Yield all parameters, those of ``*`` and ``**`` too."""
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (item for item in (arguments.vararg, arguments.kwarg) if item is not None)


def function_scope(node: FunctionNode, name: str, parent: Scope | None) -> Scope:
    """Return the scope of a function, filled with all that it binds."""
    scope = Scope(name, parent)
    collector = Collector(scope)
    for argument in parameters(node.args):
        collector.bind(argument.arg, "parameter", argument)
    for parameter in getattr(node, "type_params", ()):
        collector.bind(parameter.name, "parameter", parameter)
    for statement in node.body:
        collector.visit(statement)
    if any(item.form == "definition" for found in scope.bindings.values() for item in found):
        inside = (item for item in walk(node) if isinstance(item, ast.Nonlocal))
        scope.shared = frozenset(name for item in inside for name in item.names)
    return scope


def module_names(tree: ast.Module) -> Mapping[str, list[Binding]]:
    """Return what a module binds on its own level, and what functions of it bind there by `global`."""
    scope = Scope("", None)
    collector = Collector(scope)
    for statement in tree.body:
        collector.visit(statement)
    for node in walk(tree):
        if isinstance(node, ast.Global):
            for name in node.names:
                scope.bindings.setdefault(name, [binding(name, "variable", node)])
    return scope.bindings
