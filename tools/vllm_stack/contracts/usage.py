"""Walking over the code of a patch: all that relies on something outside of the patch is looked up."""

from __future__ import annotations

import ast
import bisect
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_stack.contracts.observation import Observation, Status
from vllm_stack.contracts.resolve import Cause, ClassRef, FunctionRef, InstanceRef, Missing, ModuleRef, Value
from vllm_stack.contracts.scopes import (
    BlockScope,
    FileScope,
    FunctionScope,
    class_names,
    comprehension_names,
    lambda_names,
)
from vllm_stack.contracts.signatures import Arguments
from vllm_stack.contracts.summary import flatten, imports, read_function
from vllm_stack.contracts.symbols import Import, Module, dotted
from vllm_stack.contracts.visiting import Visitor, walk

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator

    from vllm_stack.contracts.infer import Scope
    from vllm_stack.contracts.observing import Observer

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
#: Calls whose second argument names an attribute of the first: by the last part of what is called.
_NAMING = frozenset({"setattr", "delattr", "object", "getattr"})
#: Methods whose signature a subclass chooses freely.
_FREE = frozenset({"__init__", "__new__", "__init_subclass__", "__post_init__"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Walker(Visitor, ast.NodeVisitor):
    """Collects the observations of one file of a patch in one tree.

    Only nodes that touch the ``added`` lines count. Their positions are the keys, so that the same file
    can be walked on another tree and compared; ``there`` is the module's name in it, if that is another.
    """

    def __init__(
        self, own: Module, added: Collection[int], observer: Observer, there: str | None = None
    ) -> None:
        self.observations: dict[Hashable, Observation] = {}
        self._own = own
        self._added = added
        self._sorted = added if isinstance(added, range) else sorted(added)
        self._observer = observer
        self._inference = observer.inference
        self._package = own.package
        #: What the module is called in the tree.
        self._there = there or own.name
        self._file = FileScope(own, added, self._inference, self._there)
        self._scope: Scope = self._file
        self._class: ClassRef | None = None
        self._guarded: set[ast.stmt] = set()
        #: Attributes that the code asks for with `hasattr`: it can do without them.
        self._asked: set[str] = set()
        self._docstrings: set[ast.expr] = set()

    # -- help ------------------------------------------------------------------------------------------

    def _touches(self, node: ast.expr | ast.stmt | ast.keyword) -> bool:
        decorators = getattr(node, "decorator_list", None)
        first = min(node.lineno, decorators[0].lineno) if decorators else node.lineno
        at = bisect.bisect_left(self._sorted, first)
        return at < len(self._sorted) and self._sorted[at] <= (node.end_lineno or node.lineno)

    def visit(self, node: ast.AST) -> None:
        """Walk a node, unless it is a statement that the patch did not touch."""
        if not isinstance(node, ast.stmt) or self._touches(node):
            super().visit(node)

    def _key(self, kind: str, node: ast.expr | ast.stmt) -> Hashable:
        return (self._own.path, kind, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def _note(self, observation: Observation) -> None:
        self.observations.setdefault(observation.key, observation)

    def _value(self, node: ast.expr) -> Value | Missing | None:
        return self._inference.value(node, self._scope)

    def _visit_in(self, scope: Scope, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        outer, self._scope = self._scope, scope
        for node in nodes:
            self.visit(node)
        self._scope = outer

    # -- imports ---------------------------------------------------------------------------------------

    def visit_Try(self, node: ast.Try) -> None:
        """Imports that may fail are relied on only where their alternatives fail too."""
        names = [dotted(item) or "" for handler in node.handlers for item in _caught(handler)]
        if any(name.rpartition(".")[2] in _IMPORT_ERRORS for name in names):
            bodies = [node.body, *(handler.body for handler in node.handlers)]
            statements = [item for body in bodies for item in flatten(body)]
            self._guarded.update(
                item for item in statements if isinstance(item, (ast.Import, ast.ImportFrom))
            )
            self._alternatives(node)
        self.generic_visit(node)

    def _alternatives(self, node: ast.Try) -> None:
        first = dict(_imported(node.body, self._package))
        handlers = [item for handler in node.handlers for item in handler.body]
        for name, second in _imported(handlers, self._package):
            found = first.get(name)
            if found is None or found.name is None or second.name is None or found.line not in self._added:
                continue
            one = self._observer.defined(found, found.line)
            other = self._observer.defined(second, second.line)
            best = other if other.status is Status.HOLDS and one.status is not Status.HOLDS else one
            contract = f"{one.contract or found.module} or {other.contract or second.module}"
            key = (self._own.path, "alternatives", name, found.line)
            self._note(
                Observation(
                    key,
                    best.status,
                    found.line,
                    contract,
                    best.expected,
                    best.found,
                    best.site,
                    name=found.name,
                )
            )

    def visit_Import(self, node: ast.Import) -> None:
        """Observe that the modules are there."""
        if node not in self._guarded:
            for alias in node.names:
                if alias.lineno in self._added:
                    self._note(self._observer.module(alias.name, alias.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Observe that the module is there and defines the names."""
        if node in self._guarded:
            return
        for _, found in imports(node, self._package):
            if found.line in self._added:
                self._note(self._observer.module(found.module, found.line))
                if found.name != "*":
                    self._note(self._observer.defined(found, found.line))

    # -- scopes ----------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Walk the function in its own scope."""
        self._function(node, None)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Walk the function in its own scope."""
        self._function(node, None)

    def _function(self, node: _Function, owner: ClassRef | None) -> None:
        if not self._touches(node):
            return
        if owner is not None:
            self._asked.update(_asked_for(node))
        arguments = node.args
        outside = [*node.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)]
        annotated = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        outside += [item.annotation for item in annotated if item.annotation is not None]
        self._visit_in(self._scope, [*outside, *([node.returns] if node.returns else [])])
        self._mark_docstring(node)
        # The names of a class body are not seen from its methods.
        parent = self._scope if owner is None else self._file
        first = _first_parameter(node, owner)
        scope = FunctionScope(node, parent, self._inference, self._own, first)
        outer_class, self._class = self._class, owner or self._class
        self._visit_in(scope, node.body)
        self._class = outer_class

    def _mark_docstring(self, node: _Function | ast.ClassDef | ast.Module) -> None:
        if node.body and isinstance(node.body[0], ast.Expr):
            self._docstrings.add(node.body[0].value)

    def visit_Module(self, node: ast.Module) -> None:
        """Walk the file."""
        self._mark_docstring(node)
        for statement in node.body:
            if self._own.asks and not isinstance(statement, ast.ClassDef) and self._touches(statement):
                self._asked.update(_asked_for(statement))
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Walk the lambda in its own scope."""
        self._visit_in(self._scope, [*node.args.defaults, *filter(None, node.args.kw_defaults)])
        self._visit_in(BlockScope(lambda_names(node), self._scope), [node.body])

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        outer, self._scope = self._scope, BlockScope(comprehension_names(node), self._scope)
        self.generic_visit(node)
        self._scope = outer

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    # -- classes ---------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Observe what the class relies on in its bases, and walk its body."""
        self._visit_in(
            self._scope, [*node.decorator_list, *node.bases, *(word.value for word in node.keywords)]
        )
        self._mark_docstring(node)
        value = self._file.name(node.name) if self._scope is self._file else None
        cls = value if isinstance(value, ClassRef) else None
        if cls is not None:
            self._observe_class(node, cls)
        outer, self._scope = self._scope, BlockScope(class_names(node), self._scope)
        for statement in node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._function(statement, cls)
            else:
                self.visit(statement)
        self._scope = outer

    def _observe_class(self, node: ast.ClassDef, cls: ClassRef) -> None:
        if node.lineno in self._added:
            self._note(self._observer.abstract((self._own.path, "abstract", node.name), cls, node.lineno))
        for statement in flatten(node.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if statement.lineno in self._added and statement.name not in _FREE:
                    key = (self._own.path, "override", node.name, statement.name)
                    own = read_function(statement)
                    self._note(self._observer.override(key, cls, own, statement.lineno))
            elif statement.lineno in self._added:
                self._observe_settings(node, cls, statement)

    def _observe_settings(self, node: ast.ClassDef, cls: ClassRef, statement: ast.stmt) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                key = (self._own.path, "declared", node.name, target.id)
                self._note(self._observer.declared(key, cls, target.id, statement.lineno))

    # -- expressions -----------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        """Observe that the module still has a name of its own that an added line uses."""
        name = node.id
        if not isinstance(node.ctx, ast.Load) or node.lineno not in self._added:
            return
        if self._file.is_foreign(name) and not self._scope.is_local(name):
            key = ("name", self._own.name, name)
            self._note(self._observer.attribute_of_module(key, self._there, name, node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Observe that what the attribute is read from has it."""
        self.generic_visit(node)
        line = node.end_lineno or node.lineno
        if line not in self._added:
            return
        value = self._value(node.value)
        if isinstance(node.ctx, ast.Load):
            self._attribute(self._key("attribute", node), value, node.attr, line)
        elif isinstance(value, InstanceRef) and self._class is not None and value.cls == self._class:
            key = (self._own.path, "declared", value.cls.definition.name, node.attr)
            self._note(self._observer.declared(key, value.cls, node.attr, line))

    def _attribute(self, key: Hashable, value: Value | Missing | None, name: str, line: int) -> None:
        if name in self._asked:
            return
        if isinstance(value, ModuleRef):
            self._note(self._observer.attribute_of_module(key, value.name, name, line))
        elif isinstance(value, (ClassRef, InstanceRef)):
            self._note(self._observer.attribute(key, value, name, line))
        elif isinstance(value, Missing):
            self._note(self._observer.blocked(key, line, value.cause))

    def visit_Call(self, node: ast.Call) -> None:
        """Observe that what is called takes the arguments."""
        self.generic_visit(node)
        line = next(
            (at for at in range(node.lineno, (node.end_lineno or node.lineno) + 1) if at in self._added), 0
        )
        head = self._touches(node.func) or any(self._touches(word) for word in node.keywords)
        if not line or not (head or any(argument.lineno in self._added for argument in node.args)):
            return
        value = self._value(node.func)
        if isinstance(value, (FunctionRef, ClassRef)):
            key = self._key("call", node)
            self._note(self._observer.call(key, value, Arguments.of(node), line))
        elif isinstance(value, Missing):
            self._note(self._observer.blocked(self._key("call", node), line, value.cause))
        self._named_attribute(node, line)

    def _named_attribute(self, node: ast.Call, line: int) -> None:
        """Observe ``setattr(owner, "name", ...)`` and what mocks make of it."""
        word = (dotted(node.func) or "").rpartition(".")[2]
        optional = word == "getattr" and len(node.args) > 2  # noqa: PLR2004 - it has a default
        if word in _NAMING and len(node.args) > 1 and not optional:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._attribute(self._key("named", node), self._value(node.args[0]), name.value, line)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Observe that what a string such as "vllm.platforms.cuda.CudaPlatform" names is there."""
        text = node.value
        if not isinstance(text, str) or node in self._docstrings or node.lineno not in self._added:
            return
        if _DOTTED.fullmatch(text) and self._observer.tree.holds(text):
            self._note(self._path(text, node.lineno))

    def _path(self, text: str, line: int) -> Observation:
        tree = self._observer.tree
        parts = text.split(".")
        depth = max(count for count in range(1, len(parts) + 1) if tree.exists(".".join(parts[:count])))
        key, contract = ("path", text), f"{text} exists"
        value: Value | Missing | None = ModuleRef(".".join(parts[:depth]))
        for part in parts[depth:]:
            before, value = value, self._inference.attribute(value, part)
            if value is None and isinstance(before, ClassRef) and self._inference.member(before, part):
                return Observation(key, Status.HOLDS, line, contract, text)
        if isinstance(value, Missing):
            found = f"there is no {_text(value.cause)}"
            return Observation(key, Status.ABSENT, line, contract, found=found, name=parts[-1])
        status = Status.UNKNOWN if value is None else Status.HOLDS
        return Observation(key, status, line, contract, text, name=parts[-1])


def _text(cause: Cause) -> str:
    return cause.module if cause.name is None else f"{cause.module}.{cause.name}"


@lru_cache(maxsize=512)
def _asked_for(node: ast.stmt) -> frozenset[str]:
    """Return the attributes that a statement asks for; it is looked at in several trees."""
    calls = (call for call in walk(node) if isinstance(call, ast.Call) and len(call.args) > 1)
    names = (call.args[1] for call in calls if dotted(call.func) == "hasattr")
    return frozenset(
        name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)
    )


def _caught(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return [ast.Name("BaseException", ast.Load())]
    return list(handler.type.elts) if isinstance(handler.type, ast.Tuple) else [handler.type]


def _imported(body: list[ast.stmt], package: str) -> Iterator[tuple[str, Import]]:
    for statement in flatten(body):
        yield from imports(statement, package)


def _first_parameter(node: _Function, owner: ClassRef | None) -> Value | None:
    """Return what ``self`` or ``cls`` is in a method."""
    if owner is None:
        return None
    binding = read_function(node).binding
    if binding == "static":
        return None
    return owner if binding == "class" else InstanceRef(owner)
