"""Find Triton kernels in the sources of a package, through its imports, without importing anything.

What a model can launch is in the modules that it imports. :func:`import_closure` follows the imports
at the top of each module, and in some modules also those inside functions; :func:`entry_kernels` reads
which functions of a module are kernels that no other kernel calls.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_Import = ast.Import | ast.ImportFrom
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python sources of one package."""

    folder: Path
    """The package's folder; its name is the package's."""

    def path(self, module: str) -> Path | None:
        """Return the file of a module of the package, or None if there is none."""
        package, *parts = module.split(".")
        if package != self.folder.name:
            return None
        place = self.folder.joinpath(*parts)
        candidates = (place / "__init__.py", place.with_suffix(".py"))
        return next((path for path in candidates if path.is_file()), None)


def _imports(tree: ast.AST, *, in_functions: bool) -> Iterator[_Import]:
    """Yield import statements, without those that only type checkers see."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, _Import):
            yield child
        if isinstance(child, _Function) and not in_functions:
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield from _imports(child, in_functions=in_functions)


def _names(statement: _Import, package: str) -> Iterator[str]:
    """Yield the modules that a statement may import; some are names within a module."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = statement.module or ""
    if statement.level:
        parent = package.split(".")
        parent = parent[: len(parent) - (statement.level - 1)]
        base = ".".join([*parent, *([base] if base else [])])
    yield base
    yield from (f"{base}.{alias.name}" for alias in statement.names)


def import_closure(sources: Sources, seeds: Iterable[str], deep: tuple[str, ...]) -> dict[str, Path]:
    """Return all modules of the package that ``seeds`` import, directly or through others.

    Args:
        sources: The package.
        seeds: Modules to begin with.
        deep: Prefixes of modules whose imports inside functions count too.

    Raises:
        ModuleNotFoundError: A seed is no module of the package.
    """
    found: dict[str, Path] = {}
    missing = [seed for seed in seeds if sources.path(seed) is None]
    if missing:
        raise ModuleNotFoundError(f"not in {sources.folder}: {', '.join(missing)}")
    waiting = list(seeds)
    while waiting:
        module = waiting.pop()
        path = sources.path(module)
        if module in found or path is None:
            continue
        found[module] = path
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(path.read_text())
        for statement in _imports(tree, in_functions=module.startswith(deep)):
            waiting.extend(_names(statement, package))
    return found


def _kernels(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield qualified name and definition of each function that ``triton.jit`` decorates."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(decorator) for decorator in child.decorator_list
        ):
            yield prefix + child.name, child
        inside = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
        yield from _kernels(child, inside)


def _called(function: ast.FunctionDef) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def entry_kernels(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the kernels of each module that has any, without those that other kernels call."""
    kernels = {name: dict(_kernels(ast.parse(path.read_text()))) for name, path in modules.items()}
    called = {name for each in kernels.values() for function in each.values() for name in _called(function)}
    return {module: set(each) - called for module, each in kernels.items() if each}
