"""Names that the code of a patch takes from the functions it stands in, looked up in the new release.

Text can merge while the function around it has lost the parameter or the variable that the added lines
read. The function as the patch leaves it on the new release is therefore read as Python would: a name that
nothing binds there any more is a broken contract, be the lines that read it the patch's or upstream's.
"""

from __future__ import annotations

import ast
import bisect
import builtins
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_stack.contracts.bindings import Binding, module_names
from vllm_stack.contracts.observation import Site, definition_site
from vllm_stack.contracts.reaching import Read, reads_of
from vllm_stack.contracts.summary import flatten
from vllm_stack.contracts.symbols import Function, Import, Variable, read_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vllm_stack.contracts.symbols import Definition, Module
    from vllm_stack.patch import FileDiff

#: A name in a function of a file: the function's dotted name, and the name.
_Key = tuple[str, str]
_NamedNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class BoundName:
    """A name that added lines take from upstream's function around them."""

    contract: str
    expected: str
    line: int
    """Where the patch reads it, in its own release."""
    site: Site
    """Where that release binds it."""
    function: Site
    """Where the function stands there."""
    forms: frozenset[str]


@dataclass(frozen=True)
class LostName:
    """A name that nothing binds where the patched new release reads it."""

    contract: str
    expected: str
    found: str
    line: int | None
    """Where the patch reads it in its own release; None for a read of upstream's."""
    sites: tuple[Site, ...]
    """Where the old release binds it, and the function there."""
    place: Site
    """Where it is read in the patched new release."""
    of_module: str
    """The contract that says the same where the module was what defined it."""


class Version:
    """A Python file of one tree, as far as a change touched it.

    ``others`` are other versions of the file: what they have word for word is left out.
    """

    def __init__(
        self,
        path: str,
        text: bytes,
        module: Module,
        tree: ast.Module,
        change: FileDiff | None = None,
        others: Iterable[bytes] = (),
    ) -> None:
        self.path = path
        self.module = module
        self._tree = tree
        self.text = text
        self._lines = text.split(b"\n")
        self._others = [b"\n%b\n" % other for other in others]
        self._change = change
        self._found: dict[str, _NamedNode | None] = {}
        self.added = frozenset() if change is None else frozenset(added_numbers(change))
        self._touched = None if change is None else sorted(self.added | set(_beside_removed(change)))

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """What the functions and classes that were touched read."""
        return tuple(reads_of(self._tree, self))

    def has(self, statement: ast.stmt) -> bool:
        """Say whether the change touched a statement."""
        if self._touched is None:
            return True
        at = bisect.bisect_left(self._touched, _first_line(statement))
        return at < len(self._touched) and self._touched[at] <= (statement.end_lineno or statement.lineno)

    def enters(self, statement: ast.stmt) -> bool:
        """Say whether the change touched a function or class that no other version has like this."""
        return self.has(statement) and not any(self._words(statement) in other for other in self._others)

    def _words(self, statement: ast.stmt) -> bytes:
        """Return the lines of a statement."""
        lines = self._lines[_first_line(statement) - 1 : statement.end_lineno]
        return b"\n%b\n" % b"\n".join(lines)

    def is_the_same(self, before: bytes, after: bytes) -> bool:
        """Say whether the change is the very same between two versions of the file, in the same functions."""
        if self._change is None:
            return False
        made = [Counter(_with_mark(self._change, mark)) for mark in (b"-", b"+")]
        lines = [Counter(text.split(b"\n")) for text in (before, after)]
        if made != [lines[0] - lines[1], lines[1] - lines[0]]:
            return False
        other = b"\n%b\n" % after
        return all(self._words(item) in other and is_closed for item, is_closed in self._entered())

    def _entered(self) -> Iterator[tuple[ast.stmt, bool]]:
        """Yield the functions that are touched, of classes each statement, and whether it stands alone."""
        for statement in flatten(self._tree.body):
            if isinstance(statement, ast.ClassDef) and self.has(statement):
                yield from ((part, _is_closed(part)) for part in statement.body if self.has(part))
            elif isinstance(statement, _Named) and self.has(statement):
                yield statement, True

    def is_unbound(self, read: Read) -> bool:
        """Say whether a read finds nothing for sure."""
        if read.is_local:
            return not read.bindings
        return not self.module.stars and not self._is_of_module(read.name)

    def _is_of_module(self, name: str) -> bool:
        is_implied = name in _BUILTINS or (name.startswith("__") and name.endswith("__"))
        return is_implied or name in self.module.bindings or name in self._all_names

    @cached_property
    def _all_names(self) -> Mapping[str, list[Binding]]:
        return module_names(self._tree)

    def lost(self) -> dict[_Key, Read]:
        """Return the names that are unbound, each where it is read first."""
        lost: dict[_Key, Read] = {}
        for read in sorted(self.reads, key=lambda item: item.line):
            if self.is_unbound(read):
                lost.setdefault((read.function, read.name), read)
        return lost

    def whole(self) -> Version:
        """Return the same file, all of it to be looked at."""
        return Version(self.path, self.text, self.module, self._tree)

    def function(self, name: str) -> _NamedNode | None:
        """Return the statement that defines a function or class, by its dotted name."""
        if name not in self._found:
            self._found[name] = self._look_up(name)
        return self._found[name]

    def _look_up(self, name: str) -> _NamedNode | None:
        found: ast.AST = self._tree
        for part in name.split("."):
            inside = (node for node in ast.walk(found) if isinstance(node, _Named) and node.name == part)
            following = next((node for node in inside if node is not found), None)
            if following is None:
                return None
            found = following
        return found if isinstance(found, _Named) else None

    def site(self, name: str) -> Site:
        """Return where a function or class stands; the first line where it is not there."""
        node = self.function(name)
        return Site(self.path, 1, 1) if node is None else Site(self.path, node.lineno, node.end_lineno or 0)


_BUILTINS = frozenset(dir(builtins))
_Named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def taken_names(old: Version) -> dict[_Key, BoundName]:
    """Return the names that the added lines of a patch take from upstream's functions around them."""
    taken: dict[_Key, BoundName] = {}
    for read in sorted(old.reads, key=lambda item: item.line):
        upstreams = sorted((item for item in read.bindings if item.line not in old.added), key=_by_line)
        key = (read.function, read.name)
        if read.line in old.added and upstreams and key not in taken:
            taken[key] = _taken(old, read, upstreams)
    return taken


def _by_line(binding: Binding) -> int:
    return binding.line


def _taken(old: Version, read: Read, bindings: list[Binding]) -> BoundName:
    first = bindings[0]
    return BoundName(
        _contract(old, read),
        f"a {first.form} {read.name} at {old.path}:{first.line}",
        read.line,
        Site(old.path, first.line, first.end_line),
        old.site(read.function),
        frozenset(item.form for item in bindings),
    )


def _contract(at: Version, read: Read) -> str:
    return f"{at.module.name}.{read.function} binds {read.name}"


def lost_names(old: Version, before: Callable[[], Version | None], new: Version) -> Iterator[LostName]:
    """Yield the names that the patch reads, or makes upstream's lines read, and that nothing binds any more.

    ``old`` and ``new`` are the file as the patch leaves it on either release; ``before`` gives it as it is
    on the new one without the patch: what is unbound there, or on the old release, is not its doing.
    """
    taken = taken_names(old)
    lost = new.lost()
    if lost:
        without = before()
        known = {*old.lost(), *(without.whole().lost() if without is not None else ())}
        for key, read in lost.items():
            if key not in known:
                yield _lost(old, new, read, _counterpart(taken, read))
    for key, read in _replaced(taken, new).items():
        if key not in lost:
            yield _lost(old, new, read, taken[key])


def _counterpart(taken: Mapping[_Key, BoundName], read: Read) -> BoundName | None:
    """Return what the patch took where it was made, from the same function or one of another name."""
    same = taken.get((read.function, read.name))
    return same or next((found for (_, name), found in taken.items() if name == read.name), None)


def _replaced(taken: Mapping[_Key, BoundName], new: Version) -> dict[_Key, Read]:
    """Return reads of added lines that mean a name of the module now, and another thing than before."""
    found: dict[_Key, Read] = {}
    for read in new.reads:
        old = None if new.module.stars else taken.get((read.function, read.name))
        if old is None or read.is_local or read.line not in new.added or new.is_unbound(read):
            continue
        if not _may_be_moved(old.forms, new.module.bindings.get(read.name, ())):
            found.setdefault((read.function, read.name), read)
    return found


def _may_be_moved(forms: Iterable[str], now: tuple[Definition, ...]) -> bool:
    """Say whether upstream may have moved what a function bound to the level of the module."""
    is_variable = any(isinstance(item, Variable) for item in now)
    return any(form != "parameter" and (is_variable or (form != "variable" and now)) for form in forms)


def _lost(old: Version, new: Version, read: Read, taken: BoundName | None) -> LostName:
    whose = "the patch" if read.line in new.added else "the new release itself"
    return LostName(
        taken.contract if taken else _contract(new, read),
        taken.expected if taken else f"a binding of {read.name}, which {whose} reads there",
        _said(new, read),
        taken.line if taken else None,
        (taken.site, taken.function) if taken else (),
        Site(new.path, read.line, read.line),
        f"{old.module.name} defines {read.name}",
    )


def _said(new: Version, read: Read) -> str:
    """Say what there is instead."""
    node = new.function(read.function)
    shown = read.function
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        shown += str(read_signature(node.args))
    where = f"read at {new.path}:{read.line}"
    if read.is_local:
        return f"nothing that binds {read.name} comes before it is {where}, in {shown}"
    if new.is_unbound(read):
        return f"nothing binds {read.name} in {shown}, {where}"
    definitions = new.module.bindings.get(read.name)
    what = "the built-in name"
    if definitions:
        line = definition_site(new.module, definitions[-1]).line
        what = f"{_kind(definitions[-1])} {read.name} of the module at {new.path}:{line}"
    return f"{read.name} means {what} now, {where}: nothing binds it in {shown}"


def _kind(definition: Definition) -> str:
    if isinstance(definition, Import):
        return "the import"
    if isinstance(definition, Function):
        return "the function"
    return "the variable" if isinstance(definition, Variable) else "the class"


def _is_closed(statement: ast.stmt) -> bool:
    """Say whether a statement of a class is a function that takes nothing from it, as a setter does."""
    decorators = getattr(statement, "decorator_list", ())
    is_function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
    return is_function and not any(isinstance(item, ast.Attribute) for item in decorators)


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(item.lineno for item in decorators)])


def _with_mark(change: FileDiff, mark: bytes) -> Iterator[bytes]:
    """Yield the lines that a change adds, or takes away."""
    return (line[1:] for hunk in change.hunks for line in hunk.lines if line[:1] == mark)


def added_numbers(change: FileDiff) -> Iterator[int]:
    """Yield the numbers of the lines that a change adds, in the file after it."""
    return (number for number, kind in _numbered(change) if kind == b"+")


def _beside_removed(change: FileDiff) -> Iterator[int]:
    """Yield the numbers of the lines on both sides of what a change takes away."""
    for number, kind in _numbered(change):
        if kind == b"-":
            yield from (number - 1, number)


def _numbered(change: FileDiff) -> Iterator[tuple[int, bytes]]:
    for hunk in change.hunks:
        number = hunk.new_start
        for line in hunk.lines:
            yield number, line[:1]
            number += line[:1] in (b"+", b" ")
