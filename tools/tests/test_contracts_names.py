"""Names that a patch takes from upstream's functions: kept once and lost once for each way to bind one."""

from __future__ import annotations

import ast
import importlib
import inspect
import symtable
from dataclasses import replace
from textwrap import indent
from typing import TYPE_CHECKING

import pytest
from contractkit import findings, place_of
from tworeleases import TwoReleases, commit_files

from vllm_stack.amended import still_relies
from vllm_stack.carrying import carry
from vllm_stack.contracts import check_contracts, list_contracts
from vllm_stack.contracts.bindings import function_scope, module_names
from vllm_stack.contracts.reaching import reads_of

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_stack.replay import PatchPlace

UP = "demo/up.py"
#: As many lines as a patch shows around its change, so that a change beyond them never conflicts.
FILLER = "# one\n# two\n# three\n# four\n"


def source(head: str, added: str = "", tail: str = "", deep: int = 1) -> str:
    """Return a module: ``head`` opens functions, ``added`` stands in the innermost, ``tail`` behind it."""
    inner = " " * 4 * deep
    body = indent(f"{FILLER}here = 0\n{added}{FILLER}", inner)
    return f"{head}{body}{indent(tail, inner)}{inner}return here\n"


#: Name, what stands before the patched place on the old release and on the new one, the patch's lines,
#: what the new release has behind them, and what is found.
CASES: list[tuple[str, str, str, str, str, list[tuple[str, str]]]] = [
    (
        "a parameter that is called otherwise",
        "def f(a, b):\n",
        "def f(a, c):\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "nothing binds b in f(a, c), read at demo/up.py:7")],
    ),
    ("a parameter that stays", "def f(a, b):\n", "def f(b, *, a=1):\n", "use(b, a)\n", "", []),
    ("a parameter that is a local by now", "def f(b):\n", "def f():\n    b = 1\n", "use(b)\n", "", []),
    (
        "a keyword-only parameter",
        "def f(*, b):\n",
        "def f(*, c):\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "nothing binds b in f(*, c)")],
    ),
    (
        "the further arguments",
        "def f(*args, **words):\n",
        "def f(*rest, **more):\n",
        "use(args, words)\n",
        "",
        [("demo.up.f binds args", "f(*rest, **more)"), ("demo.up.f binds words", "f(*rest, **more)")],
    ),
    (
        "a parameter of the same name as a built-in",
        "def f(input):\n",
        "def f(prompt):\n",
        "use(input)\n",
        "",
        [("demo.up.f binds input", "input means the built-in name now, read at demo/up.py:7")],
    ),
    (
        "a parameter of the same name as an import",
        "import config\n\ndef f(config):\n",
        "import config\n\ndef f(settings):\n",
        "use(config)\n",
        "",
        [("demo.up.f binds config", "config means the import config of the module at demo/up.py:1 now")],
    ),
    (
        "a local variable that is gone",
        "def f():\n    b = 1\n",
        "def f():\n    c = 1\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "nothing binds b in f()")],
    ),
    (
        "a local variable that moved to the module",
        "def f():\n    b = 1\n",
        "b = 1\n\ndef f():\n",
        "use(b)\n",
        "",
        [],
    ),
    (
        "an import that moved to the module",
        "def f():\n    from os import sep\n",
        "from os import sep\n\ndef f():\n",
        "use(sep)\n",
        "",
        [],
    ),
    (
        "a local variable of the same name as a function",
        "def b(): pass\ndef f():\n    b = 1\n",
        "def b(): pass\ndef f():\n    c = 1\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "b means the function b of the module at demo/up.py:1 now")],
    ),
    (
        "a variable of the module of the same name that already was there",
        "b = 0\ndef f():\n    pass\n",
        "b = 0\ndef f():\n    c = 1\n",
        "use(b)\n",
        "",
        [],
    ),
    (
        "a variable that comes later by now",
        "def f():\n    b = 1\n",
        "def f():\n    pass\n",
        "use(b)\n",
        "b = 1\n",
        [("demo.up.f binds b", "nothing that binds b comes before it is read at demo/up.py:8, in f()")],
    ),
    (
        "a variable that is bound on one of several ways",
        "def f(a):\n    b = 1\n",
        "def f(a):\n    if a:\n        b = 1\n    else:\n        c = 1\n",
        "use(b)\n",
        "",
        [],
    ),
    (
        "a variable that the other way binds",
        "def f(a):\n    b = 1\n",
        "def f(a):\n    if a:\n        b = 1\n        return b\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "nothing that binds b comes before")],
    ),
    (
        "a variable that is deleted by now",
        "def f():\n    b = 1\n",
        "def f():\n    b = 1\n    del b\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "nothing that binds b comes before")],
    ),
    (
        "the target of a walrus",
        "def f(a):\n    if (b := a): pass\n",
        "def f(a):\n    if a: pass\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "nothing binds b in f(a)")],
    ),
    (
        "the target of a walrus in a comprehension",
        "def f(a):\n    any((b := x) for x in a)\n",
        "def f(a):\n    any(x for x in a)\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "nothing binds b in f(a)")],
    ),
    (
        "the variable of a loop",
        "def f(a):\n    for b, c in a: pass\n",
        "def f(a):\n    for d, c in a: pass\n",
        "use(b, c)\n",
        "",
        [("demo.up.f binds b", "nothing binds b in f(a)")],
    ),
    (
        "the variable of a comprehension was never one of the function",
        "def f(a):\n    [b for b in a]\n",
        "def f(a):\n    [c for c in a]\n",
        "[b for b in a]\n",
        "",
        [],
    ),
    (
        "what `with` opens",
        "def f(a):\n    with a as (b, c): pass\n",
        "def f(a):\n    with a as (d, c): pass\n",
        "use(b, c)\n",
        "",
        [("demo.up.f binds b", "nothing binds b in f(a)")],
    ),
    (
        "what an import binds",
        "def f():\n    import os.path\n    from x import y as z\n",
        "def f():\n    from x import y\n",
        "use(os, z)\n",
        "",
        [("demo.up.f binds os", "nothing binds os in f()"), ("demo.up.f binds z", "nothing binds z in f()")],
    ),
    (
        "what a pattern captures",
        "def f(a):\n    match a:\n        case [b, *c]: pass\n        case {'x': d, **e}: pass\n",
        "def f(a):\n    match a:\n        case [_, *_]: pass\n        case {'x': _}: pass\n",
        "use(b, c, d, e)\n",
        "",
        [(f"demo.up.f binds {name}", f"nothing binds {name} in f(a)") for name in "bcde"],
    ),
    (
        "a function inside the function",
        "def f():\n    def g(): pass\n    class C: pass\n",
        "def f():\n    def h(): pass\n",
        "g(C)\n",
        "",
        [("demo.up.f binds g", "nothing binds g in f()"), ("demo.up.f binds C", "nothing binds C in f()")],
    ),
    (
        "what the module declares for its functions",
        "def g():\n    global b\n    b = 1\ndef f():\n    b = 1\n",
        "def g():\n    global b\n    b = 1\ndef f():\n    pass\n",
        "use(b)\n",
        "",
        [("demo.up.f binds b", "b means")],
    ),
    (
        "a name that `global` makes the module's",
        "b = 1\ndef f():\n    global b\n    b = 2\n",
        "def f():\n    global b\n    b = 2\n",
        "use(b)\n",
        "",
        [],
    ),
    (
        "a module that imports all of another",
        "def f(b):\n",
        "from elsewhere import *\n\ndef f(c):\n",
        "use(b)\n",
        "",
        [],
    ),
    (
        "what the patch binds itself",
        "def f(b):\n",
        "def f(c):\n",
        "b = 1\nuse(b)\n",
        "",
        [],
    ),
    (
        "what the patch makes of a parameter",
        "def f(b):\n",
        "def f(c):\n",
        "b = b + 1\nuse(b)\n",
        "",
        [("demo.up.f binds b", "nothing that binds b comes before it is read at demo/up.py:7, in f(c)")],
    ),
    (
        "what the patch adds to",
        "def f(b):\n",
        "def f(c):\n",
        "b += 1\n",
        "",
        [("demo.up.f binds b", "nothing that binds b comes before it is read at demo/up.py:7, in f(c)")],
    ),
    (
        "what a lambda, a comprehension and a function of the patch take",
        "def f(b, c, d):\n",
        "def f(x, y, z):\n",
        "use(lambda d=d: b)\nuse([c for _ in c])\ndef own(): return d\n",
        "",
        [
            ("demo.up.f binds d", "nothing binds d in f(x, y, z), read at demo/up.py:7"),
            ("demo.up.f binds b", "nothing binds b in f(x, y, z), read at demo/up.py:7"),
            ("demo.up.f binds c", "nothing binds c in f(x, y, z), read at demo/up.py:8"),
            ("demo.up.f.own binds d", "nothing binds d in f.own(), read at demo/up.py:9"),
        ],
    ),
    (
        "a name that nothing binds on the old release either",
        "def f(b):\n",
        "def f(c):\n",
        "use(magic)\n",
        "",
        [],
    ),
]


def carried(place: PatchPlace) -> PatchPlace:
    """Return the place with the patch merged into the new release."""
    attempt = carry(place.git, place.patch, place.old_before, place.old_after, place.new_before)
    assert attempt.tree is not None
    assert attempt.outcome.applied
    commit = place.git.run("commit-tree", attempt.tree, "-p", place.new_before, "-m", "x").text
    return replace(place, new_after=commit)


@pytest.mark.parametrize(
    ("old", "new", "added", "tail", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_names_of_a_function(
    tmp_path: Path, old: str, new: str, added: str, tail: str, expected: list[tuple[str, str]]
) -> None:
    # `use` comes last in the file, so that line numbers are those of the function.
    rest = "\ndef use(*values): pass\n"
    place = place_of(
        tmp_path,
        {UP: source(old) + rest},
        {UP: source(new, tail=tail) + rest},
        {UP: source(old, added) + rest},
    )
    assert place.new_after is not None, "the patch has to apply"
    found = check_contracts(place)
    assert [(one.contract, one.origin) for one in found] == [(text, "derived") for text, _ in expected]
    assert [part for one, (_, part) in zip(found, expected, strict=True) if part not in one.found] == []
    if old != new:
        assert all(one.upstream_change for one in found)
    # On its own release the same patch breaks nothing.
    same = place_of(tmp_path / "same", {UP: source(old) + rest}, {}, {UP: source(old, added) + rest})
    assert check_contracts(same) == ()


def test_what_upstream_did_is_shown(tmp_path: Path) -> None:
    old, new = "def f(\n    a,\n    b,\n):\n", "def f(\n    a,\n    c,\n):\n"
    (found,) = findings(tmp_path, {UP: source(old)}, {UP: source(new)}, {UP: source(old, "print(b)\n")})
    assert (found.path, found.line, found.definition) == (UP, 10, f"{UP}:3")
    assert found.expected == f"a parameter b at {UP}:3"
    assert found.upstream_change[2:] == ("@@ -3 +3 @@", "-    b,", "+    c,")


def test_where_the_binding_itself_is_as_it_was_the_change_of_the_function_is_shown(tmp_path: Path) -> None:
    old = "def f():\n    b = 1\n    print(b)\n"
    new = old + "    del b\n"
    (found,) = findings(tmp_path, {UP: source(old)}, {UP: source(new)}, {UP: source(old, "print(b)\n")})
    assert found.definition == f"{UP}:2"
    assert "+    del b" in found.upstream_change


def test_upstreams_own_lines_in_a_function_that_the_patch_makes(tmp_path: Path) -> None:
    """A patch that puts a header into a function makes its rest read the names of the new one."""
    filler = indent(FILLER, "    ")
    body = f"{filler}    # five\n{filler}    return (\n        a,\n        b,\n    )\n"
    old = f"def f(a, b):\n{body}"
    new = f"def f(a, b, c):\n{body}".replace("        b,\n", "        b,\n        c,\n")
    patch = old.replace("    # five\n", "    return _f(a, b)\n\n\ndef _f(a, b):\n    # five\n")
    (found,) = findings(tmp_path, {UP: old}, {UP: new}, {UP: patch})
    assert (found.contract, found.line) == ("demo.up._f binds c", None)
    assert found.expected == "a binding of c, which the new release itself reads there"
    assert found.found == f"nothing binds c in _f(a, b), read at {UP}:18"
    assert "+        c," in found.upstream_change


def test_a_binding_that_the_patch_takes_away(tmp_path: Path) -> None:
    old = source("def f():\n    # zero\n    b = 1\n    # one\n    print(b)\n")
    new = old.replace("    return here\n", "    return b\n")
    patch = old.replace("    b = 1\n", "").replace("    print(b)\n", "    print(1)\n")
    (found,) = findings(tmp_path, {UP: old}, {UP: new}, {UP: patch})
    assert (found.contract, found.line) == ("demo.up.f binds b", None)
    assert found.upstream_change[-2:] == ("-    return here", "+    return b")


def test_a_function_of_another_name(tmp_path: Path) -> None:
    """The lines may land in a function that is called otherwise: it counts what that one binds."""
    patch = {UP: source("def f(b):\n", "print(b)\n")}
    kept = findings(tmp_path / "kept", {UP: source("def f(b):\n")}, {UP: source("def g(b):\n")}, patch)
    assert kept == ()
    (lost,) = findings(tmp_path / "lost", {UP: source("def f(b):\n")}, {UP: source("def g(c):\n")}, patch)
    assert (lost.contract, lost.definition) == ("demo.up.f binds b", f"{UP}:1")
    assert "nothing binds b in g(c)" in lost.found


@pytest.mark.parametrize(
    ("old", "new", "added", "expected"),
    [
        # a function inside a function sees what is around it
        ("def f(b):\n    def g():\n", "def f(c):\n    def g():\n", "print(b)\n", ["demo.up.f.g binds b"]),
        ("def f():\n    def g(b):\n", "def f(b):\n    def g():\n", "print(b)\n", []),
        (
            "def f():\n    b = 1\n    def g():\n",
            "def f():\n    def g():\n",
            "print(b)\n",
            ["demo.up.f.g binds b"],
        ),
        # what is bound after the inner function is there when it is called
        (
            "def f():\n    b = 1\n    def g():\n",
            "def f():\n    del b\n    b = 1\n    def g():\n",
            "print(b)\n",
            [],
        ),
        # methods see their parameters and no names of the class
        (
            "class C:\n    def g(self, b):\n",
            "class C:\n    def g(self, c):\n",
            "print(b)\n",
            ["demo.up.C.g binds b"],
        ),
        (
            "class C:\n    def g(self, b):\n",
            "class C:\n    b = 1\n    def g(self):\n",
            "print(b)\n",
            ["demo.up.C.g binds b"],
        ),
        (
            "def f():\n    b = 1\n    def g():\n        nonlocal b\n",
            "def f():\n    def g():\n        nonlocal b\n",
            "b = 2\n",
            [],
        ),
    ],
)
def test_functions_inside_others(tmp_path: Path, old: str, new: str, added: str, expected: list[str]) -> None:
    before, after, patched = (
        source(head, text, deep=2) for head, text in ((old, ""), (new, ""), (old, added))
    )
    found = findings(tmp_path, {UP: before}, {UP: after}, {UP: patched})
    assert [one.contract for one in found] == expected


def test_nonlocal_of_the_patch_needs_a_function_around(tmp_path: Path) -> None:
    old = "def f():\n    b = 1\n    def g():\n"
    added = source(old, "nonlocal b\nb = 2\n", deep=2)
    new = source(old.replace("b = 1", "c = 1"), deep=2)
    (found,) = findings(tmp_path, {UP: source(old, deep=2)}, {UP: new}, {UP: added})
    assert found.contract == "demo.up.f.g binds b"


def test_names_of_a_class_body(tmp_path: Path) -> None:
    body = indent(f"{FILLER}here = 0\n{FILLER}", "    ")
    old, new = f"class C:\n    b = 1\n{body}", f"class C:\n    c = 1\n{body}"
    patch = old.replace("    here = 0\n", "    here = 0\n    there = b\n")
    (found,) = findings(tmp_path, {UP: old}, {UP: new}, {UP: patch})
    assert (found.contract, found.expected) == ("demo.up.C binds b", f"a variable b at {UP}:2")
    assert "nothing binds b in C, read at" in found.found


def test_a_property_that_a_setter_of_the_patch_extends(tmp_path: Path) -> None:
    body = f"    @property\n    def b(self):\n{indent(FILLER, '        ')}        return 1\n"
    old, new = f"class C:\n{body}", f"class C:\n{body}".replace("def b(", "def c(")
    patch = old + "\n    @b.setter\n    def b(self, value):\n        pass\n"
    (found,) = findings(tmp_path, {UP: old}, {UP: new}, {UP: patch})
    assert found.contract == "demo.up.C binds b"


def test_what_an_earlier_patch_binds(tmp_path: Path) -> None:
    """A name that the first patch adds is there for the second, unless the first did not apply."""
    old = {"demo/__init__.py": "", UP: source("def f():\n    a = 1\n")}
    first = {UP: old[UP].replace("    a = 1\n", "    a = 1\n    b = 2\n")}
    second = {UP: first[UP].replace("    here = 0\n", "    here = b\n")}
    for new, broken in (("    # new\n    a = 1\n", []), ("    a = 3\n", ["demo.up.f binds b"])):
        release = {**old, UP: old[UP].replace("    a = 1\n", new)}
        folder = tmp_path / str(len(broken))
        folder.mkdir()
        releases = TwoReleases(folder, dict(old), dict(release))
        releases.add_patch(dict(first), "[Demo] Bind b")
        releases.add_patch(dict(second), "[Demo] Read b")
        found = check_contracts(carried(releases.places()[1]))
        assert [one.contract for one in found] == broken


def test_a_renamed_file(tmp_path: Path) -> None:
    rest = "".join(f"\n\ndef function_{n}():\n    return {n}\n" for n in range(20))
    old, new = source("def f(b):\n") + rest, source("def f(c):\n") + rest
    patch = {UP: source("def f(b):\n", "print(b)\n") + rest}
    moved = {UP: "", "demo/deep/moved.py": new}
    (found,) = check_contracts(carried(place_of(tmp_path, {UP: old}, moved, patch)))
    assert (found.contract, found.path) == ("demo.up.f binds b", UP)
    assert "read at demo/deep/moved.py:7" in found.found


def test_what_an_amendment_leaves_is_still_broken(tmp_path: Path) -> None:
    """The statement is another one by then, and the name in it is as unbound as before."""
    place = place_of(
        tmp_path,
        {UP: source("def f(a, b):\n")},
        {UP: source("def f(c, d):\n")},
        {UP: source("def f(a, b):\n", "print(a, b)\n")},
    )
    for amended, left in (("print(c, b)\n", ["demo.up.f binds b"]), ("print(c, d)\n", [])):
        files = {"demo/__init__.py": "", UP: source("def f(c, d):\n", amended)}
        commit = commit_files(place.git, files, "Amended", place.new_before)
        there = replace(place, new_after=commit)
        found = [one for one in check_contracts(there) if still_relies(there, one)]
        assert [one.contract for one in found] == left


def test_a_keyword_that_upstreams_function_does_not_take(tmp_path: Path) -> None:
    """That is a contract of the call, for functions of the same file and methods too."""
    rest = "\n\ndef g(*, key): pass\n\n\nclass C:\n    def m(self, *, key): pass\n"
    old = source("def f(c: 'C'):\n") + rest
    patch = {UP: source("def f(c: 'C'):\n", "g(key=1)\nc.m(key=2)\n") + rest}
    found = findings(tmp_path, {UP: old}, {UP: old.replace("key", "word")}, patch)
    assert [(one.contract, one.upstream_change[-1]) for one in found] == [
        ("demo.up.g accepts (key=_)", "+def g(*, word): pass"),
        ("demo.up.C.m accepts (key=_)", "+    def m(self, *, word): pass"),
    ]


def test_names_are_listed(tmp_path: Path) -> None:
    old = source("def f(a, b):\n    c = a\n    c = c + 1\n")
    patch = {UP: source("def f(a, b):\n    c = a\n    c = c + 1\n", "own = b\nprint(own, c)\n")}
    listed = list_contracts(place_of(tmp_path, {UP: old}, {}, patch))
    assert [(one.contract, one.expected, one.line) for one in listed] == [
        ("demo.up.f binds b", f"a parameter b at {UP}:1", 9),
        ("demo.up.f binds c", f"a variable c at {UP}:3", 10),
    ]


#: A body of a function in which `x` is read as `use(x)`, and whether it can be bound there.
WAYS: list[tuple[str, bool]] = [
    ("use(x)\nx = 1", False),
    ("x = 1\nuse(x)", True),
    ("x: int\nuse(x)", False),
    ("x: int = 1\nuse(x)", True),
    ("x = y = use(x)", False),
    ("x = 2\nx[0] = 1\nuse(x)", True),
    ("x[0] = 1\nx = use(1)", False),
    ("if a:\n    x = 1\nuse(x)", True),
    ("if a:\n    x = 1\nelse:\n    use(x)", False),
    ("for x in a:\n    pass\nuse(x)", True),
    ("for y in use(x):\n    x = 1", False),
    ("for y in a:\n    use(x)\n    x = 1", True),
    ("for y in a:\n    if y:\n        x = 1\n        continue\n    use(x)", True),
    ("for y in a:\n    if y:\n        x = 1\n        break\nelse:\n    use(x)", False),
    ("for y in a:\n    if y:\n        x = 1\n        break\nuse(x)", True),
    ("while use(x):\n    x = 1", True),
    ("while a:\n    del x\n    use(x)\nx = 1", False),
    ("while (x := a):\n    pass\nuse(x)", True),
    ("a and (x := 1)\nuse(x)", True),
    ("use(x) and (x := 1)", False),
    ("try:\n    x = 1\nexcept E:\n    use(x)", True),
    ("try:\n    a()\nexcept E:\n    use(x)\nelse:\n    x = 1", False),
    ("try:\n    x = a()\n    return x\nfinally:\n    use(x)", True),
    ("try:\n    a()\nfinally:\n    x = 1\nuse(x)", True),
    ("for y in a:\n    try:\n        break\n    finally:\n        x = 1\nuse(x)", True),
    ("try:\n    a()\nexcept E as x:\n    use(x)", True),
    ("try:\n    a()\nexcept E as x:\n    pass\nuse(x)", False),
    ("try:\n    a()\nexcept* E as x:\n    use(x)", True),
    ("try:\n    raise a\nexcept E:\n    x = 1\nuse(x)", True),
    ("with a as x:\n    use(x)", True),
    ("with a(x) as x:\n    pass", False),
    ("with a:\n    x = 1\n    return x\nuse(x)", True),
    ("return a\nuse(x)\nx = 1", True),  # it is never reached
    ("match a:\n    case [x]:\n        use(x)", True),
    ("match a:\n    case [x]:\n        pass\n    case _:\n        use(x)", True),
    ("match a:\n    case [y]:\n        x = 1\n    case _:\n        use(x)", False),
    ("match a:\n    case {**x}:\n        use(x)", True),
    ("import x.y\nuse(x)", True),
    ("import y.x as z\nuse(x)\nx = 1", False),
    ("from y import x\nuse(x)", True),
    ("class x: pass\nuse(x)", True),
    ("x = 1\ndel x\nuse(x)", False),
    ("if a:\n    x = 1\n    del x\nuse(x)\nx = 2", False),
    ("def g():\n    return use(x)\nx = 1", True),
    ("y = lambda: use(x)\nx = 1", True),
    ("y = (use(x) for _ in a)\nx = 1", True),
    ("y = [use(x) for _ in a]\nx = 1", False),
    ("y = [use(x) for x in a]\nx = 1", True),
    ("y = {x: use(x) for x in a}", True),
    ("y = [x for z in use(x)]\nx = 1", False),
    ("lambda x: use(x)", True),
    ("y = lambda: (x := 1) and use(x)", True),
    ("def g():\n    nonlocal x\n    x = 1\ng()\nuse(x)\nx = 2", True),
    ("global x\nuse(x)\nx = 1", True),
    ("def g(x): pass\nuse(x)\nx = 1", False),
    ("class C:\n    x = 1\n    y = use(x)", True),
    ("class C:\n    y = use(x)\nx = 1", True),  # its body may run later
    ("class C:\n    y = use(x)\n    x = 1", True),  # that is the module's
    ("async def g():\n    async for x in a:\n        use(x)", True),
    ("async def g():\n    async with a as x:\n        use(x)", True),
]


class Everything:
    """All of a module."""

    def has(self, statement: ast.stmt) -> bool:
        """Take a statement."""
        return bool(statement)

    def enters(self, statement: ast.stmt) -> bool:
        """Look into a function or class."""
        return bool(statement)


@pytest.mark.parametrize(("body", "bound"), WAYS, ids=[case[0].replace("\n", "; ") for case in WAYS])
def test_ways_through_a_function(body: str, bound: bool) -> None:
    tree = ast.parse(f"x = None\ndef f(a, E, use):\n{indent(body, '    ')}\n")
    reads = [read for read in reads_of(tree, Everything()) if read.name == "x"]
    unbound = [read for read in reads if read.is_local and not read.bindings]
    assert (not unbound) == bound


@pytest.mark.parametrize(
    "name", ["argparse", "ast", "dataclasses", "inspect", "tarfile", "typing", "zipfile"]
)
def test_scopes_are_pythons_own(name: str) -> None:
    """Python's compiler says which names are local to each function; the standard library has them all."""
    text = inspect.getsource(importlib.import_module(name))
    tree = ast.parse(text)
    table = symtable.symtable(text, name, "exec")
    ours = dict(_our_locals(tree))
    theirs = dict(_their_locals(table))
    assert len(ours) > 20
    assert {key: ours[key] for key in sorted(ours)} == {key: theirs[key] for key in sorted(ours)}
    bound = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    assert set(module_names(tree)) >= bound


def _our_locals(tree: ast.Module) -> list[tuple[tuple[str, int], set[str]]]:
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    found = []
    for node in functions:
        scope = function_scope(node, node.name, None)
        found.append(((node.name, node.lineno), {name for name in scope.bindings if scope.owns(name)}))
    return found


def _their_locals(table: symtable.SymbolTable) -> list[tuple[tuple[str, int], set[str]]]:
    found = []
    for child in table.get_children():
        if isinstance(child, symtable.Function):
            found.append(((child.get_name(), child.get_lineno()), set(child.get_locals())))
        found += _their_locals(child)
    return found
