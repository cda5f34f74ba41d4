"""What a Python file imports from the tree that it is in, and where that is defined; nothing is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_stack.contracts.summary import absolute_module, parse
from vllm_stack.fileversions import Version
from vllm_stack.linemap import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm_stack.git import Git

#: A name may be handed on by this many modules before its definition is given up.
_MOST_STEPS = 6


@dataclass(frozen=True)
class Import:
    """One imported module, or one name of it."""

    module: str
    name: str | None = None


@dataclass(frozen=True)
class Definition:
    """Where a name is defined."""

    path: str
    span: Span


def imports_of(data: bytes, path: str) -> tuple[Import, ...]:
    """Return what the file ``path`` imports, anywhere in it, in order and each once."""
    tree = parse(data)
    if tree is None:
        return ()
    found: dict[Import, None] = {}
    for node in ast.walk(tree):
        for item in _imports(node, path):
            found.setdefault(item)
    return tuple(found)


def _imports(node: ast.AST, path: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = _absolute(node, path)
        yield from (Import(module, alias.name) for alias in node.names if module)


def _absolute(node: ast.ImportFrom, path: str) -> str:
    """Return the module of a ``from`` with its leading dots resolved for the file ``path``."""
    return absolute_module(node, path.rpartition("/")[0].replace("/", "."))


@dataclass(frozen=True)
class Sources:
    """The Python files of one commit."""

    git: Git
    commit: str

    @cached_property
    def paths(self) -> frozenset[str]:
        """All files."""
        return frozenset(self.git.run("ls-tree", "-r", "-z", "--name-only", self.commit).fields)

    @cached_property
    def _trees(self) -> dict[str, ast.Module | None]:
        return {}

    def tree(self, path: str) -> ast.Module | None:
        """Return the syntax tree of a file."""
        if path not in self._trees:
            self._trees[path] = parse(Version(self.git, self.commit, path).data)
        return self._trees[path]

    def module_file(self, module: str) -> str | None:
        """Return the file of a module of this tree, or None for one of another project."""
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.paths), None)

    def locate(self, item: Import) -> Definition | None:
        """Return where an imported thing is defined; None for what is not of this tree, or not found.

        A module stands for its whole file, with an empty span. Names that a module hands on are followed.
        """
        for _ in range(_MOST_STEPS):
            file = self.module_file(item.module if item.name is None else f"{item.module}.{item.name}")
            if file:
                return Definition(file, Span(0, 0))
            file = self.module_file(item.module)
            if file is None or item.name is None:
                return None
            found = self._in_file(file, item.name)
            if not isinstance(found, Import):
                return Definition(file, found or Span(0, 0))
            item = found
        return None

    def defines(self, path: str, name: str) -> bool:
        """Say whether a file defines a name at its top level, or takes it from another module."""
        return self._in_file(path, name) is not None

    def _in_file(self, path: str, name: str) -> Span | Import | None:
        """Return the lines that define a name at the top level of a file, or where it takes it from."""
        tree = self.tree(path)
        for node in _top_level(tree.body) if tree else ():
            if name in _defined(node):
                return _span(node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return Import(_absolute(node, path), alias.name)
        return None


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that make a module's names, those behind a condition as well."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _top_level(node.body)
            yield from _top_level(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


def _defined(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _span(node: ast.stmt) -> Span:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(item.lineno for item in decorators)])
    return Span(first - 1, node.end_lineno or node.lineno)
