"""From source text to what a module defines."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_stack.collecting import without_collection
from vllm_stack.contracts.symbols import (
    Binding,
    Class,
    Definition,
    Function,
    Import,
    Module,
    Variable,
    dotted,
)
from vllm_stack.contracts.visiting import walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_Functions = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Statements that have others inside them, of the same scope.
_Blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)
#: Decorators that leave the signature of what they decorate, by the last part of their name.
_KEEPING = frozenset(
    {
        "abstractmethod",
        "asynccontextmanager",
        "cache",
        "classmethod",
        "contextmanager",
        "deprecated",
        "final",
        "inference_mode",
        "lru_cache",
        "no_grad",
        "overload",
        "override",
        "staticmethod",
    }
)
_PROPERTIES = frozenset({"abstractproperty", "cached_property", "deleter", "getter", "property", "setter"})


@lru_cache(maxsize=32)
def parse(text: bytes) -> ast.Module | None:
    """Parse a module; None when it is not valid Python (a template, or a newer syntax).

    The latest trees are kept, since several things are asked about the same file: they must not be changed.
    """
    with warnings.catch_warnings(), without_collection():
        warnings.simplefilter("ignore")  # upstream's own invalid escapes are not ours to report
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return None


def summarize(text: bytes, name: str, path: str) -> Module | None:
    """Return what the module ``name`` at ``path`` defines; None when it cannot be parsed."""
    tree = parse(text)
    if tree is None:
        return None
    package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
    reader = _Reader(package)
    bindings: dict[str, list[Definition]] = defaultdict(list)
    for statement in flatten(tree.body):
        for bound, definition in reader.definitions(statement):
            bindings[bound].append(definition)
    has_getattr = any(isinstance(found, Function) for found in bindings.get("__getattr__", []))
    return Module(
        name,
        path,
        {bound: tuple(found) for bound, found in bindings.items()},
        tuple(reader.stars),
        _lazy_names(tree) if has_getattr else frozenset(),
        has_getattr,
        _exported(tree),
        asks=b"hasattr" in text,
        walruses=b":=" in text,
    )


def flatten(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of one scope: those inside if, try, with, for and while too, no function's."""
    for statement in body:
        yield statement
        if not isinstance(statement, _Blocks):
            continue
        for blocks in ("body", "orelse", "finalbody"):
            yield from flatten(getattr(statement, blocks, []))
        for handler in getattr(statement, "handlers", []):
            yield from flatten(handler.body)
        for case in getattr(statement, "cases", []):
            yield from flatten(case.body)


def absolute_module(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that a ``from`` import in ``package`` names."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    kept = parts[: max(len(parts) - (node.level - 1), 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def imports(node: ast.stmt, package: str) -> Iterator[tuple[str, Import]]:
    """Yield the names that an import statement binds; ``*`` stands for all of a module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            target = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or target, Import(target, None, _line(alias, node), _end(alias, node))
    elif isinstance(node, ast.ImportFrom):
        module = absolute_module(node, package)
        for alias in node.names:
            found = Import(module, alias.name, _line(alias, node), _end(alias, node))
            yield alias.asname or alias.name, found


def _line(node: ast.alias, statement: ast.stmt) -> int:
    return getattr(node, "lineno", statement.lineno)


def _end(node: ast.alias, statement: ast.stmt) -> int:
    return getattr(node, "end_lineno", None) or statement.end_lineno or statement.lineno


class _Reader:
    """Reads the definitions of one module."""

    def __init__(self, package: str) -> None:
        self._package = package
        self.stars: list[str] = []

    def definitions(self, node: ast.stmt) -> Iterator[tuple[str, Definition]]:
        """Yield what one statement binds in its scope."""
        if isinstance(node, _Functions):
            yield node.name, read_function(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, self._class(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, found in imports(node, self._package):
                if name == "*":
                    self.stars.append(found.module)
                else:
                    yield name, found
        else:
            for variable in assigned(node):
                yield variable.name, variable

    def _class(self, node: ast.ClassDef) -> Class:
        members: dict[str, list[Definition]] = defaultdict(list)
        attributes: dict[str, list[Variable]] = defaultdict(list)
        for statement in flatten(node.body):
            for name, definition in self.definitions(statement):
                members[name].append(definition)
                if isinstance(definition, Function) and isinstance(statement, _Functions):
                    for variable in _self_attributes(statement, definition):
                        attributes[variable.name].append(variable)
        metaclass = next((word.value for word in node.keywords if word.arg == "metaclass"), None)
        return Class(
            node.name,
            node.lineno,
            node.end_lineno or node.lineno,
            tuple(node.bases),
            None if metaclass is None else ast.unparse(metaclass),
            tuple(node.decorator_list),
            {name: tuple(found) for name, found in members.items()},
            {name: tuple(found) for name, found in attributes.items()},
        )


def read_function(node: _FunctionNode) -> Function:
    """Return what is to be known of a function."""
    decorators = tuple(dotted(decorator) or "?" for decorator in node.decorator_list)
    words = [decorator.rpartition(".")[2] for decorator in decorators]
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = {argument.arg: argument.annotation for argument in every if argument.annotation is not None}
    return Function(
        node.name,
        node.lineno,
        node.end_lineno or node.lineno,
        node.args,
        annotations,
        None if isinstance(node, ast.AsyncFunctionDef) or _wraps_result(words) else node.returns,
        _binding(node.name, words),
        "abstractmethod" in words or "abstractproperty" in words,
        "overload" in words,
        all(word in _KEEPING or word in _PROPERTIES for word in words),
        decorators,
    )


def _wraps_result(decorators: list[str]) -> bool:
    return not {"contextmanager", "asynccontextmanager"}.isdisjoint(decorators)


def _binding(name: str, decorators: list[str]) -> Binding:
    if not _PROPERTIES.isdisjoint(decorators):
        return "property"
    if "staticmethod" in decorators or name == "__new__":
        return "static"
    if "classmethod" in decorators or name in ("__init_subclass__", "__class_getitem__"):
        return "class"
    return "function"


def assigned(node: ast.stmt) -> Iterator[Variable]:
    """Yield the plain names that a statement assigns or declares."""
    end = node.end_lineno or node.lineno
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield Variable(node.target.id, node.lineno, end, node.annotation, node.value)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            value = node.value if isinstance(target, ast.Name) else None
            for name in _target_names(target):
                yield Variable(name, node.lineno, end, None, value)
    else:
        for target in _other_targets(node):
            for name in _target_names(target):
                yield Variable(name, node.lineno, node.lineno)


def _other_targets(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, (ast.For, ast.AsyncFor)):
        yield node.target
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        yield from (item.optional_vars for item in node.items if item.optional_vars is not None)
    elif isinstance(node, ast.AugAssign):
        yield node.target


def _target_names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _target_names(element)
    elif isinstance(target, ast.Starred):
        yield from _target_names(target.value)


def _self_attributes(node: _FunctionNode, method: Function) -> Iterator[Variable]:
    """Yield what a method assigns to its first parameter, in nested blocks too."""
    parameters = [*node.args.posonlyargs, *node.args.args]
    if not parameters or method.binding == "static":
        return
    first = parameters[0].arg
    for statement in _statements(node.body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            yield from _assigned_to(first, statement, method)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements below ``body``, those of functions inside it too."""
    for statement in flatten(body):
        yield statement
        if isinstance(statement, _Functions):
            yield from _statements(statement.body)


def _assigned_to(
    first: str, statement: ast.Assign | ast.AnnAssign | ast.AugAssign, method: Function
) -> Iterator[Variable]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
    for target in targets:
        single = isinstance(target, ast.Attribute) and not isinstance(statement, ast.AugAssign)
        if isinstance(target, ast.Name):
            continue  # as most are
        for element in ast.walk(target):
            if (
                isinstance(element, ast.Attribute)
                and isinstance(element.ctx, ast.Store)
                and isinstance(element.value, ast.Name)
                and element.value.id == first
            ):
                value = statement.value if single else None
                end = statement.end_lineno or statement.lineno
                yield Variable(element.attr, statement.lineno, end, annotation, value, method)


def _lazy_names(tree: ast.Module) -> frozenset[str]:
    """Return the names that ``__getattr__`` can serve: keys of module-level tables, and its own literals."""
    names: set[str] = set()
    for statement in flatten(tree.body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Dict):
            names.update(_strings(key for key in statement.value.keys if key is not None))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__getattr__":
            names.update(_strings(walk(statement)))
    return frozenset(name for name in names | _exported(tree) if name.isidentifier())


def _exported(tree: ast.Module) -> frozenset[str]:
    names: set[str] = set()
    for statement in flatten(tree.body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(dotted(target) == "__all__" for target in targets) and statement.value is not None:
                names.update(_strings(walk(statement.value)))
    return frozenset(names)


def _strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
