"""Whether the pin's ``layout`` still fits a release, as far as its sources tell.

The layout names by hand what is native and what was generated. A release that moves such a file, or brings a
new kind of compiled source, makes it wrong without any error: a patch of that file would then go into an
overlay wheel, where it does nothing.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_stack.classify import PathClass, classify, is_compiled_source, matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm_stack.base import Base
    from vllm_stack.pins import Layout

#: Scripts of the build whose own texts name further files that take part in it.
_BUILD_SCRIPTS = ("setup.py",)
#: Files at the root that tell a build system what to do.
_BUILD_FILES = frozenset(
    {"build.rs", "Cargo.toml", "Cargo.lock", "CMakeLists.txt", "hatch_build.py", "Makefile", "MANIFEST.in"}
    | {"meson.build", "pyproject.toml", "rust-toolchain.toml", "setup.cfg", "setup.py"}
)

#: How each of its sentences begins.
LAYOUT_NOTES = ("layout.package:", "layout.native:", "layout.generated:")


def check_layout(layout: Layout, present: Base, candidate: Base) -> tuple[str, ...]:
    """Return what in ``layout``, which fits ``present``, does not fit the candidate, one sentence each."""
    before, after = _paths(present), _paths(candidate)
    found = [
        *_vanished(layout, after),
        *_new_sources(layout, before, after),
        *_new_build_files(layout, after),
    ]
    scripts = {path: candidate.git.blob(candidate.commit, path) for path in _BUILD_SCRIPTS if path in after}
    found += _named_by_scripts(layout, scripts, after)
    return tuple(dict.fromkeys(found))


def _paths(base: Base) -> frozenset[str]:
    return frozenset(base.git.run("ls-tree", "-r", "-z", "--name-only", base.commit).fields)


def _vanished(layout: Layout, after: frozenset[str]) -> Iterator[str]:
    if f"{layout.package}/__init__.py" not in after:
        yield f"layout.package: there is no {layout.package}/__init__.py"
    for pattern in layout.native:
        if not any(matches(path, (pattern,)) for path in after):
            yield f"layout.native: there is no {pattern} any more; its successor may have to be listed"
    # Generated files are left out of a base: one that is in it has a name that layout.generated lacks.
    for path in sorted(after):
        if path.rpartition("/")[2] == "PKG-INFO" or ".egg-info/" in path:
            yield f"layout.generated: {path} was made when the sdist was packed, and is not listed"


def _new_sources(layout: Layout, before: frozenset[str], after: frozenset[str]) -> Iterator[str]:
    """Yield top-level folders with compiled sources that are not native, unless they were there before."""
    known = {_top(path) for path in before if is_compiled_source(path)}
    outside = {path for path in after if classify(path, layout) is PathClass.OUTSIDE}
    for folder in sorted({_top(path) for path in outside if is_compiled_source(path)} - known):
        yield f"layout.native: {folder} holds compiled sources now, and is not listed"


def _top(path: str) -> str:
    return path.partition("/")[0]


def _new_build_files(layout: Layout, after: frozenset[str]) -> Iterator[str]:
    for path in sorted(after & _BUILD_FILES):
        if not matches(path, layout.native):
            yield f"layout.native: {path} steers the build, and is not listed"


def _named_by_scripts(layout: Layout, scripts: dict[str, bytes], after: Iterable[str]) -> Iterator[str]:
    """Yield files outside the package that a script of the build names, and that are not native."""
    candidates = {path for path in after if classify(path, layout) is PathClass.OUTSIDE}
    for script, source in scripts.items():
        for named in sorted(_named_paths(source)):
            if named in candidates and named.endswith((".py", ".sh", ".cmake", ".txt", ".toml")):
                yield f"layout.native: {script} uses {named}, which is not listed"


def _named_paths(source: bytes) -> set[str]:
    """Return the paths that a Python script spells: in one text, joined by ``/`` or by ``os.path.join``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    paths: set[str] = set()
    for node in ast.walk(tree):
        parts = _joined(node)
        # A path's end is what names the file: what it begins with may be any variable.
        paths.update("/".join(parts[start:]) for start in range(len(parts)))
    return paths


def _joined(node: ast.AST) -> list[str]:
    """Return the texts at the end of a path that ``node`` puts together."""
    match node:
        case ast.Constant(value=str() as text):
            return [text.removeprefix("./")]
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str() as text)):
            return [*_joined(left), text]
        case ast.Call(func=ast.Attribute(value=start, attr="join" | "joinpath"), args=arguments):
            return [text for part in (start, *arguments) for text in _joined(part)]
    return []
