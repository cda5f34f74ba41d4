"""Which bindings can reach the place where a function reads a name.

Everything here errs to one side. A read counts as unbound only where no way through the function binds the
name before it: what one branch of several binds, or an earlier turn of a loop, may be there.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_stack.contracts.bindings import (
    Binder,
    Binding,
    Collector,
    FunctionNode,
    Scope,
    binding,
    function_scope,
    parameters,
)
from vllm_stack.contracts.summary import flatten
from vllm_stack.contracts.visiting import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm_stack.contracts.bindings import Form

_Functions = (ast.FunctionDef, ast.AsyncFunctionDef)
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Read:
    """A name that is read inside a function or a class.

    ``is_local`` says that functions and classes decide what it means. The module does otherwise.
    """

    function: str
    """The dotted name, within the module, of the function or class."""
    name: str
    line: int
    bindings: frozenset[Binding]
    """What may have bound it; nothing for a local name that is unbound for sure."""
    is_local: bool


#: Name to what may have bound it; None where no way leads.
_State = dict[str, frozenset[Binding]] | None


def _joined(*states: _State) -> _State:
    """Return what may be bound where several ways meet."""
    alive = [state for state in states if state is not None]
    if not alive:
        return None
    joined = dict(alive[0])
    for state in alive[1:]:
        for name, bindings in state.items():
            joined[name] = joined.get(name, frozenset()) | bindings
    return joined


@dataclass
class _Loop:
    """What may be bound where a loop is left or begun again."""

    breaks: _State = None
    continues: _State = None


class _Flow(Binder, ast.NodeVisitor):
    """Follows the ways through one function, or one class body, and notes what is read."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.found: dict[tuple[int, int, str], Read] = {}
        self.inside: dict[ast.stmt, None] = {}
        """Functions and classes in it, to be followed afterwards."""
        self._state: _State = {}
        #: For each `try` and `with` around: what may be bound when it is left at any point.
        self._escapes: list[dict[str, frozenset[Binding]]] = []
        self._loops: list[_Loop] = []
        #: Names of the comprehensions and lambdas around.
        self._own: list[frozenset[str]] = []
        #: How many lambdas and generators are around, which run at any time.
        self._late = 0

    def function(self, node: FunctionNode) -> None:
        """Follow a function."""
        names = [item.arg for item in parameters(node.args)]
        names += [item.name for item in getattr(node, "type_params", ())]
        first = {
            name: frozenset(item for item in self._scope.bindings[name] if item.form == "parameter")
            for name in names
        }
        self._state = first
        self._run(node.body)

    def body(self, statements: Iterable[ast.stmt], choice: Choice | None) -> None:
        """Follow the statements of a class, and keep what those read that count."""
        for statement in statements:
            before = dict(self.found)
            self.visit(statement)
            if choice is not None and not choice.has(statement):
                self.found = before

    def _run(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if self._state is None:
                return  # never reached
            self.visit(statement)

    # -- names -----------------------------------------------------------------------------------------

    def bind(self, name: str, form: Form, node: ast.AST) -> None:
        """Bind a name from here on."""
        self._set(name, frozenset({binding(name, form, node)}))

    def _set(self, name: str, bindings: frozenset[Binding]) -> None:
        if self._state is not None:
            self._state = {**self._state, name: bindings}
        for escape in self._escapes:
            escape[name] = escape.get(name, frozenset()) | bindings

    def declare(self, name: str) -> None:
        """Unbind a name: this is `del`, or an annotation."""

    def visit_Name(self, node: ast.Name) -> None:
        """Note a read, or bind, or unbind."""
        if any(node.id in names for names in self._own):
            return
        if isinstance(node.ctx, ast.Store):
            self.bind(node.id, "variable", node)
            return
        self._read(node.id, node)
        if isinstance(node.ctx, ast.Del) and self._state is not None:
            self._state = {name: found for name, found in self._state.items() if name != node.id}

    def _read(self, name: str, node: ast.Name) -> None:
        scope = self._scope
        bindings = scope.lookup(name)
        if scope.owns(name) and name not in scope.shared and not self._late:
            bindings = (self._state or {}).get(name, frozenset())
            if scope.is_class and not bindings:
                bindings = None  # what a class body has not bound yet is the module's
        key = (node.lineno, node.col_offset, name)
        known = self.found[key].bindings if key in self.found else frozenset()
        is_local = bindings is not None
        self.found[key] = Read(scope.name, name, node.lineno, known | (bindings or frozenset()), is_local)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        """A name that a function around must have: Python refuses the file if none does."""
        for name in node.names:
            bindings = self._scope.lookup_around(name) or frozenset()
            self.found[node.lineno, node.col_offset, name] = Read(
                self._scope.name, name, node.lineno, bindings, is_local=True
            )

    # -- assignments: what is assigned is evaluated first -----------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        """Evaluate, then bind."""
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Read, evaluate, then bind."""
        if isinstance(node.target, ast.Name):
            self._read(node.target.id, node.target)
        self.visit(node.value)
        self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        """Evaluate, then bind: perhaps, for an operator before it may have decided."""
        self.visit(node.value)
        name = node.target.id
        if not any(name in names for names in self._own):
            before = (self._state or {}).get(name, frozenset())
            self._set(name, before | {binding(name, "variable", node.target)})

    # -- scopes inside ---------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: FunctionNode) -> None:
        """Bind its name; it is called when all of this one may have run."""
        super().visit_FunctionDef(node)
        self.inside[node] = None

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Bind its name, and follow its body afterwards."""
        super().visit_ClassDef(node)
        self.inside[node] = None

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Follow a lambda, whose own names hide others."""
        super().visit_Lambda(node)
        own = {argument.arg for argument in parameters(node.args)}
        own |= {item.target.id for item in walk(node.body) if isinstance(item, ast.NamedExpr)}
        self._with_own(own, lambda: self.visit(node.body), late=True)

    def _comprehension(self, node: _Comprehension) -> None:
        self.visit(node.generators[0].iter)
        targets = (item for generator in node.generators for item in ast.walk(generator.target))
        own = {item.id for item in targets if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)}

        def follow() -> None:
            for at, generator in enumerate(node.generators):
                expressions = [generator.target, *([generator.iter] if at else []), *generator.ifs]
                for expression in expressions:
                    self.visit(expression)
            parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
            for part in parts:
                self.visit(part)

        self._with_own(own, follow, late=isinstance(node, ast.GeneratorExp))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def _with_own(self, names: Iterable[str], follow: Callable[[], None], *, late: bool) -> None:
        self._own.append(frozenset(names))
        self._late += late
        follow()
        self._late -= late
        self._own.pop()

    # -- ways ------------------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        """Follow both branches."""
        self.visit(node.test)
        start = self._state
        self._run(node.body)
        one, self._state = self._state, start
        self._run(node.orelse)
        self._state = _joined(one, self._state)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        """Follow a loop."""
        self.visit(node.iter)
        self._loop(node, node.target)

    visit_AsyncFor = visit_For  # noqa: N815

    def visit_While(self, node: ast.While) -> None:
        """Follow a loop."""
        self._loop(node, node.test)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, head: ast.expr) -> None:
        """Follow a loop twice: the second turn sees what the first one may have bound."""
        before = self._state
        left: _State = None
        for _ in range(2):
            self._loops.append(_Loop())
            self.visit(head)
            entered = self._state
            self._run(node.body)
            loop = self._loops.pop()
            self._state = _joined(before, entered, self._state, loop.continues)
            left = _joined(left, loop.breaks)
        self._run(node.orelse)
        self._state = _joined(self._state, left)

    def visit_Break(self, node: ast.Break) -> None:  # noqa: ARG002
        """Leave the loop."""
        self._loops[-1].breaks = _joined(self._loops[-1].breaks, self._state)
        self._state = None

    def visit_Continue(self, node: ast.Continue) -> None:  # noqa: ARG002
        """Begin the loop again."""
        self._loops[-1].continues = _joined(self._loops[-1].continues, self._state)
        self._state = None

    def visit_Return(self, node: ast.Return | ast.Raise) -> None:
        """Leave the function, or go to what catches it."""
        self.generic_visit(node)
        self._state = None

    visit_Raise = visit_Return  # noqa: N815

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        """Follow the body; what it raises may be swallowed, so that it goes on behind it."""
        for item in node.items:
            self.visit(item)
        with_all = self._escaping()
        self._run(node.body)
        self._escapes.pop()
        self._state = with_all if self._state is None else self._state

    visit_AsyncWith = visit_With  # noqa: N815

    def _escaping(self) -> dict[str, frozenset[Binding]]:
        """Begin to collect what may be bound from here on."""
        self._escapes.append(dict(self._state or {}))
        return self._escapes[-1]

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        """Follow the body, the handlers from any point of it, and what comes last."""
        ever, caught = self._escaping(), self._escaping()
        self._run(node.body)
        self._escapes.pop()
        self._run(node.orelse)
        ends = [self._state]
        for handler in node.handlers:
            self._state = dict(caught)
            self.visit(handler)
            ends.append(self._state)
        self._escapes.pop()
        self._state = _joined(*ends)
        if node.finalbody:
            self._finally(node.finalbody, ever)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        """Follow `try` with `except*`, which goes the same ways."""
        self.visit_Try(node)

    def _finally(self, body: list[ast.stmt], ever: dict[str, frozenset[Binding]]) -> None:
        """Follow what runs however the `try` is left, by `break` too."""
        goes_on = self._state is not None
        self._state = _joined(ever, self._state)
        self._run(body)
        for loop in self._loops:
            loop.breaks = loop.breaks and _joined(loop.breaks, self._state)
            loop.continues = loop.continues and _joined(loop.continues, self._state)
        self._state = self._state if goes_on else None

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Bind the exception for the handler alone."""
        if node.type is not None:
            self.visit(node.type)
        if node.name:
            self.bind(node.name, "variable", node)
        self._run(node.body)
        if node.name and self._state is not None:
            self._state = {name: found for name, found in self._state.items() if name != node.name}

    def visit_Match(self, node: ast.Match) -> None:
        """Follow each case; a pattern that fails may have bound something."""
        self.visit(node.subject)
        ends = []
        for case in node.cases:
            self.visit(case.pattern)
            if case.guard is not None:
                self.visit(case.guard)
            tried = self._state
            self._run(case.body)
            ends.append(self._state)
            self._state = tried
        self._state = _joined(self._state, *ends)


class Choice(Protocol):
    """What of a module is looked at."""

    def has(self, statement: ast.stmt) -> bool:
        """Say whether a statement counts that stands in the module or in a class."""

    def enters(self, statement: ast.stmt) -> bool:
        """Say whether a function or class is looked into: a function with all that is inside it."""


def reads_of(tree: ast.Module, choice: Choice) -> Iterator[Read]:
    """Yield what the functions and classes of a module read, as far as ``choice`` says."""
    for statement in flatten(tree.body):
        if isinstance(statement, (*_Functions, ast.ClassDef)) and choice.enters(statement):
            yield from _reads(statement, "", None, choice)


def _reads(node: ast.stmt, prefix: str, parent: Scope | None, choice: Choice | None) -> Iterator[Read]:
    if isinstance(node, _Functions):
        yield from _function_reads(node, f"{prefix}{node.name}", parent)
    elif isinstance(node, ast.ClassDef):
        yield from _class_reads(node, f"{prefix}{node.name}", parent, choice)


def _function_reads(node: FunctionNode, name: str, parent: Scope | None) -> Iterator[Read]:
    scope = function_scope(node, name, parent)
    flow = _Flow(scope)
    flow.function(node)
    yield from flow.found.values()
    for inside in flow.inside:
        yield from _reads(inside, f"{name}.", scope, None)


def _class_reads(
    node: ast.ClassDef, name: str, parent: Scope | None, choice: Choice | None
) -> Iterator[Read]:
    generic = Scope(name, parent)  # unlike the names of the body, methods see these
    for parameter in getattr(node, "type_params", ()):
        Collector(generic).bind(parameter.name, "parameter", parameter)
    scope = Scope(name, generic, is_class=True)
    collector = Collector(scope)
    for statement in node.body:
        collector.visit(statement)
    flow = _Flow(scope)
    flow.body(node.body, choice)
    yield from flow.found.values()
    for inside in flow.inside:
        if choice is None or choice.enters(inside):
            yield from _reads(inside, f"{name}.", scope, choice)
