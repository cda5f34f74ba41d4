"""Scopes of the patch's own code: what plain names mean at each place of it, in a given tree."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_stack.contracts.resolve import Cause, ClassRef, InstanceRef, Missing, Value
from vllm_stack.contracts.summary import assigned, flatten, imports
from vllm_stack.contracts.symbols import Import, Module
from vllm_stack.contracts.visiting import children

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vllm_stack.contracts.infer import Inference, Scope

_BUILTINS = frozenset(dir(builtins))
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class FileScope:
    """The module level of a file of the patch.

    ``own`` is the file as the patch leaves it, ``added`` the lines that are the patch's. What those
    lines import is looked up anew; everything else must be in the module ``there`` as the tree has it.
    """

    def __init__(self, own: Module, added: Collection[int], inference: Inference, there: str) -> None:
        self.own = own
        self.added = added
        self._inference = inference
        self._there = there

    def name(self, name: str) -> Value | Missing | None:
        """Return what a plain name means."""
        resolver = self._inference.resolver
        mine = self._mine(name)
        for found in mine:
            if isinstance(found, Import):
                return resolver.alias(resolver.imported(found))
        module = resolver.tree.module(self._there)
        if module is None:
            gone = not mine and name in self.own.bindings and resolver.tree.path_of(self._there) is None
            return Missing(Cause(self._there, None)) if gone else None
        if name not in module.bindings and (mine or name in _BUILTINS):
            return None
        return resolver.alias(resolver.bound(module, name))

    def _mine(self, name: str) -> list[object]:
        return [found for found in self.own.bindings.get(name, ()) if found.line in self.added]

    def is_foreign(self, name: str) -> bool:
        """Say whether a name is bound by lines of the file that are not the patch's."""
        return name in self.own.bindings and not self._mine(name)

    def is_local(self, name: str) -> bool:  # noqa: ARG002
        """Say whether a name is one of a function, not of the module."""
        return False

    def above(self) -> InstanceRef | None:
        """Return what ``super()`` gives."""
        return None


class BlockScope:
    """A class body, a lambda or a comprehension: some names that mean nothing known."""

    def __init__(self, names: Iterable[str], parent: Scope) -> None:
        self._names = frozenset(names)
        self._parent = parent

    def name(self, name: str) -> Value | Missing | None:
        """Return what a plain name means."""
        return None if name in self._names else self._parent.name(name)

    def is_local(self, name: str) -> bool:
        """Say whether a name is one of a function, not of the module."""
        return name in self._names or self._parent.is_local(name)

    def above(self) -> InstanceRef | None:
        """Return what ``super()`` gives."""
        return self._parent.above()


class FunctionScope:
    """A function: its parameters by their annotations, its locals where they are bound only once."""

    def __init__(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        parent: Scope,
        inference: Inference,
        own: Module,
        first: Value | None,
    ) -> None:
        self._parent = parent
        self._inference = inference
        self._first = first
        self._parameters = _parameters(node.args)
        self._first_name = next(iter(self._parameters), None)
        self._locals: dict[str, list[ast.expr | Import | None]] = defaultdict(list)
        self._declared: dict[str, ast.expr] = {}
        self._known: dict[str, Value | Missing | None] = {}
        for statement in flatten(node.body):
            self._bind(statement, own.package)
        for walrus in _walruses(node) if own.walruses else ():
            self._locals[walrus.target.id].append(walrus.value)

    def _bind(self, statement: ast.stmt, package: str) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._locals[statement.name].append(None)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for name, found in imports(statement, package):
                self._locals[name].append(found)
        else:
            for variable in assigned(statement):
                self._locals[variable.name].append(variable.value)
                if variable.annotation is not None:
                    self._declared[variable.name] = variable.annotation
            for handler in getattr(statement, "handlers", []):
                if handler.name:
                    self._locals[handler.name].append(None)

    def name(self, name: str) -> Value | Missing | None:
        """Return what a plain name means."""
        if name not in self._known:
            # A name that is defined by itself means nothing known.
            self._known[name] = None
            self._known[name] = self._looked_up(name)
        return self._known[name]

    def _looked_up(self, name: str) -> Value | Missing | None:
        bound = self._locals.get(name, [])
        if name in self._parameters:
            return None if bound else self._parameter(name)
        if not bound:
            return self._parent.name(name)
        if name in self._declared:
            return self._inference.annotation(self._declared[name], self._parent)
        if len(bound) > 1 or bound[0] is None:
            return None
        only = bound[0]
        if isinstance(only, Import):
            return self._inference.resolver.alias(self._inference.resolver.imported(only))
        return self._inference.value(only, self)

    def _parameter(self, name: str) -> Value | Missing | None:
        if name == self._first_name and self._first is not None:
            return self._first
        annotation = self._parameters[name]
        return None if annotation is None else self._inference.annotation(annotation, self._parent)

    def is_local(self, name: str) -> bool:
        """Say whether a name is one of a function, not of the module."""
        return name in self._parameters or name in self._locals or self._parent.is_local(name)

    def above(self) -> InstanceRef | None:
        """Return what ``super()`` gives."""
        if isinstance(self._first, InstanceRef):
            return InstanceRef(self._first.cls, above=True)
        return (
            InstanceRef(self._first, above=True)
            if isinstance(self._first, ClassRef)
            else self._parent.above()
        )


def _parameters(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    """Return the parameters in order, each with its annotation; those of ``*`` and ``**`` have none."""
    found = {
        item.arg: item.annotation for item in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    }
    extra = [item.arg for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return {**found, **dict.fromkeys(extra)}


@lru_cache(maxsize=512)
def _walruses(node: ast.AST) -> tuple[ast.NamedExpr, ...]:
    """Return the assignment expressions of a function, which is looked at in several trees."""
    return tuple(_inside(node))


def _inside(node: ast.AST) -> Iterator[ast.NamedExpr]:
    """Yield the assignment expressions of a function, but not those of functions inside it."""
    for child in children(node):
        if isinstance(child, ast.NamedExpr):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _inside(child)


def lambda_names(node: ast.Lambda) -> Iterable[str]:
    """Return the names that a lambda binds."""
    return _parameters(node.args)


def comprehension_names(node: _Comprehension) -> set[str]:
    """Return the names that a comprehension binds."""
    return {
        found.id
        for generator in node.generators
        for found in ast.walk(generator.target)
        if isinstance(found, ast.Name)
    }


def class_names(node: ast.ClassDef) -> set[str]:
    """Return the names that a class body binds by assignment."""
    return {variable.name for statement in flatten(node.body) for variable in assigned(statement)}
