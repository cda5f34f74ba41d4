"""Contracts that are derived from a patch's code: each kind kept once and broken once, in real git."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contractkit import NEW_FILE, findings, place_of
from tworeleases import TwoReleases

from vllm_stack.contracts import check_contracts, list_contracts
from vllm_stack.git import git_program

if TYPE_CHECKING:
    from pathlib import Path

#: Name, upstream's module demo/up.py on the old release, the same on the new one, the patch's new file,
#: and for each contract that must break its text and a part of what is found.
CASES: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    (
        "a name that is imported",
        "def f(): pass\n",
        "def g(): pass\n",
        "from demo.up import f\n",
        [("demo.up defines f", "there is no f in demo/up.py")],
    ),
    (
        "a name that stays",
        "def f(): pass\n",
        "import os\n\n\ndef f(a=1): pass\n",
        "from demo.up import f\nf()\n",
        [],
    ),
    (
        "a name that a module alias reads",
        "A = 1\nB = 2\n",
        "A = 1\n",
        "import demo.up as up\n\nprint(up.A, up.B)\n",
        [("demo.up defines B", "there is no B in demo/up.py")],
    ),
    (
        "a name that a relative import reads",
        "A = 1\n",
        "B = 1\n",
        "from .up import A\n",
        [("demo.up defines A", "there is no A in demo/up.py")],
    ),
    (
        "a name for type checking alone",
        "class T: pass\n",
        "class U: pass\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from demo.up import T\n",
        [("demo.up defines T", "there is no T in demo/up.py")],
    ),
    (
        "an import inside a function",
        "A = 1\n",
        "B = 1\n",
        "def f():\n    from demo.up import A\n    return A\n",
        [("demo.up defines A", "there is no A in demo/up.py")],
    ),
    (
        "an optional import",
        "A = 1\n",
        "B = 1\n",
        "try:\n    from demo.up import A\nexcept ImportError:\n    A = None\n",
        [],
    ),
    (
        "alternatives of which one is left",
        "A = 1\n",
        "B = 1\n",
        "try:\n    from demo.up import A\nexcept ImportError:\n    from demo.up import B as A\n",
        [],
    ),
    (
        "alternatives of which none is left",
        "A = 1\n",
        "C = 1\n",
        "try:\n    from demo.up import A\nexcept ImportError:\n    from demo.up import B as A\n",
        [("demo.up defines A or demo.up defines B", "there is no A in demo/up.py")],
    ),
    (
        "a class that became a function",
        "class C:\n    x = 1\n",
        "def C(): pass\n",
        "from demo.up import C\nC.x\n",
        [("demo.up defines C", "it is no longer a class but a function")],
    ),
    (
        "arguments by position",
        "def f(a, b): pass\n",
        "def f(a): pass\n",
        "from demo.up import f\nf(1, 2)\n",
        [("demo.up.f accepts (_, _)", "too many positional arguments; the signature is now (a)")],
    ),
    (
        "a keyword",
        "def f(*, key): pass\n",
        "def f(*, word): pass\n",
        "from demo.up import f\nf(key=1)\n",
        [("demo.up.f accepts (key=_)", "the signature is now (*, word)")],
    ),
    (
        "a keyword that further ones take",
        "def f(*, key): pass\n",
        "def f(**words): pass\n",
        "from demo.up import f\nf(key=1)\n",
        [],
    ),
    (
        "a new parameter that has to be given",
        "def f(a): pass\n",
        "def f(a, b): pass\n",
        "from demo.up import f\nf(1)\n",
        [("demo.up.f accepts (_)", "missing a required argument: 'b'")],
    ),
    (
        "arguments that are spread",
        "def f(a, b): pass\n",
        "def f(a, b, c): pass\n",
        "from demo.up import f\nf(*[1, 2, 3])\nf(**{})\n",
        [],
    ),
    (
        "a function behind decorators that keep its signature",
        "from functools import cache\n\n@cache\ndef f(a, b): pass\n",
        "from functools import cache\n\n@cache\ndef f(a): pass\n",
        "from demo.up import f\nf(1, 2)\n",
        [("demo.up.f accepts (_, _)", "too many positional arguments")],
    ),
    (
        "a function behind a decorator that may do anything",
        "from x import wrap\n\n@wrap\ndef f(a, b): pass\n",
        "from x import wrap\n\n@wrap\ndef f(a): pass\n",
        "from demo.up import f\nf(1, 2)\n",
        [],
    ),
    (
        "overloads",
        "from typing import overload\n@overload\ndef f(a): ...\n@overload\ndef f(a, b): ...\n"
        "def f(a, b=None): pass\n",
        "from typing import overload\n@overload\ndef f(a): ...\n@overload\ndef f(a, c): ...\n"
        "def f(a, c=None): pass\n",
        "from demo.up import f\nf(1, 2)\nf(1, b=2)\n",
        [("demo.up.f accepts (_, b=_)", "the signature is now (a, c=None)")],
    ),
    (
        "the constructor",
        "class C:\n    def __init__(self, a): pass\n",
        "class C:\n    def __init__(self): pass\n",
        "from demo.up import C\nC(1)\n",
        [("demo.up.C accepts (_)", "too many positional arguments")],
    ),
    (
        "the constructor of a base",
        "class B:\n    def __init__(self, a): pass\nclass C(B): pass\n",
        "class B:\n    def __init__(self): pass\nclass C(B): pass\n",
        "from demo.up import C\nC(1)\n",
        [("demo.up.C accepts (_)", "too many positional arguments")],
    ),
    (
        "the fields of a dataclass",
        "from dataclasses import dataclass, field\nfrom typing import ClassVar\n@dataclass\nclass B:\n"
        "    a: int\n    k: ClassVar[int] = 1\n    h: int = field(init=False)\n"
        "@dataclass\nclass C(B):\n    b: int = 1\n",
        "from dataclasses import dataclass, field\nfrom typing import ClassVar\n@dataclass\nclass B:\n"
        "    a: int\n    k: ClassVar[int] = 1\n    h: int = field(init=False)\n"
        "@dataclass\nclass C(B):\n    c: int = 1\n",
        "from demo.up import C\nC(1)\nC(a=1, b=2)\n",
        [("demo.up.C accepts (a=_, b=_)", "the signature is now (a, c=1)")],
    ),
    (
        "keyword-only fields of a dataclass",
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    a: int\n    b: int = 1\n",
        "from dataclasses import dataclass\n@dataclass(kw_only=True)\nclass C:\n    a: int\n    b: int = 1\n",
        "from demo.up import C\nC(1)\nC(a=1)\n",
        [("demo.up.C accepts (_)", "too many positional arguments")],
    ),
    (
        "a decorator that makes dataclasses",
        "from typing import dataclass_transform\n@dataclass_transform()\ndef config(cls): return cls\n"
        "@config\nclass C:\n    a: int = 1\n",
        "from typing import dataclass_transform\n@dataclass_transform()\ndef config(cls): return cls\n"
        "@config\nclass C:\n    b: int = 1\n",
        "from demo.up import C\nC(a=1)\n",
        [("demo.up.C accepts (a=_)", "the signature is now (b=1)")],
    ),
    (
        "a named tuple",
        "from typing import NamedTuple\nclass C(NamedTuple):\n    a: int\n    b: int\n",
        "from typing import NamedTuple\nclass C(NamedTuple):\n    a: int\n    b: int\n    c: int\n",
        "from demo.up import C\nC(1, b=2)\n",
        [("demo.up.C accepts (_, b=_)", "missing a required argument: 'c'")],
    ),
    (
        "a member of an enum",
        "from enum import Enum\nclass E(Enum):\n    A = 1\n    B = 2\n",
        "from enum import Enum\nclass E(Enum):\n    A = 1\n",
        "from demo.up import E\nE.A, E.B, E.A.value\n",
        [("class demo.up.E has attribute B", "neither E in demo/up.py:2 nor a base of it has B")],
    ),
    (
        "a method of what a member of an enum is",
        "from enum import Enum\nclass E(Enum):\n    A = 1\n    def get(self): pass\n",
        "from enum import Enum\nclass E(Enum):\n    A = 1\n",
        "from demo.up import E\nE.A.get()\n",
        [("class demo.up.E has method get(self)", "has get")],
    ),
    (
        "a static and a class method",
        "class C:\n    @staticmethod\n    def s(a): pass\n    @classmethod\n    def c(cls, a): pass\n",
        "class C:\n    @staticmethod\n    def s(): pass\n    @classmethod\n    def c(cls): pass\n",
        "from demo.up import C\nC.s(1)\nC.c(1)\nC().s(1)\n",
        [
            ("demo.up.C.s accepts (_)", "too many positional arguments"),
            ("demo.up.C.c accepts (_)", "too many positional arguments"),
        ],
    ),
    (
        "an attribute of an annotated parameter",
        "class Sub:\n    field: int\nclass C:\n    sub: Sub | None\n",
        "class Sub:\n    other: int\nclass C:\n    sub: Sub | None\n",
        "from demo.up import C\ndef f(c: 'C | None'):\n    return c.sub.field\n",
        [("class demo.up.Sub has attribute field", "has field")],
    ),
    (
        "an attribute of what a function returns",
        "class C:\n    def m(self, a): pass\ndef get() -> C: ...\n",
        "class C:\n    def n(self, a): pass\ndef get() -> C: ...\n",
        "from demo.up import get\ndef f():\n    c = get()\n    return c.m(1)\n",
        [("class demo.up.C has method m(self, a)", "has m")],
    ),
    (
        "an attribute of an instance of the module",
        "class C:\n    def m(self): pass\nthing = C()\n",
        "class C:\n    def n(self): pass\nthing = C()\n",
        "from demo.up import thing\nthing.m()\n",
        [("class demo.up.C has method m(self)", "has m")],
    ),
    (
        "an attribute that only a method sets",
        "class C:\n    def __init__(self):\n        self.x, self.y = 1, 2\n",
        "class C:\n    def __init__(self):\n        self.x = 1\n",
        "from demo.up import C\ndef f(c: C):\n    return c.x + c.y\n",
        [("class demo.up.C has attribute y", "has y")],
    ),
    (
        "a class that serves any attribute by now",
        "class C:\n    x = 1\n",
        "class C:\n    def __getattr__(self, name): return 1\n",
        "from demo.up import C\ndef f(c: C):\n    return c.x\n",
        [],
    ),
    (
        "a class that has a base from elsewhere by now",
        "class C:\n    x = 1\n",
        "from elsewhere import B\nclass C(B): pass\n",
        "from demo.up import C\ndef f(c: C):\n    return c.x\n",
        [],
    ),
    (
        "an attribute that moved to a base",
        "class C:\n    x = 1\n    def m(self): pass\n",
        "class B:\n    x = 1\n    def m(self): pass\nclass C(B): pass\n",
        "from demo.up import C\nC.x\nC().m()\nclass D(C):\n    x = 2\n    def m(self): return super().m()\n",
        [],
    ),
    (
        "an annotation that names a base by now",
        "class B: pass\nclass C(B):\n    x: int\ndef get() -> C: ...\n",
        "class B: pass\nclass C(B):\n    x: int\ndef get() -> B: ...\n",
        "from demo.up import get\nget().x\n",
        [],
    ),
    (
        "a parameter that a local variable hides",
        "class C:\n    x = 1\n",
        "class C: pass\n",
        "from demo.up import C\ndef f(c: C):\n    c = object()\n    return c.x\n",
        [],
    ),
    (
        "a method that is overridden",
        "class B:\n    def hook(self, a, *, b): pass\n",
        "class B:\n    def renamed(self, a, *, b): pass\n",
        "from demo.up import B\nclass D(B):\n    def hook(self, a, *, b): pass\n",
        [("class demo.up.B has method hook(self, a, *, b) to override", "no base of D has a method hook")],
    ),
    (
        "a parameter that overrides do not take yet",
        "class B:\n    def hook(self, a): pass\n",
        "class B:\n    def hook(self, a, *, b): pass\n",
        "from demo.up import B\nclass D(B):\n    def hook(self, a): pass\n",
        [("class demo.up.B has method hook(self, a) to override", "keyword parameter b is passed")],
    ),
    (
        "a parameter that is gone",
        "class B:\n    def hook(self, a, b): pass\n",
        "class B:\n    def hook(self, a): pass\n",
        "from demo.up import B\nclass D(B):\n    def hook(self, a, b): pass\n",
        [
            (
                "class demo.up.B has method hook(self, a, b) to override",
                "parameter b of the override is no longer passed; it is now hook(self, a)",
            )
        ],
    ),
    (
        "a parameter that has another name",
        "class B:\n    def hook(self, a): pass\n",
        "class B:\n    def hook(self, b): pass\n",
        "from demo.up import B\nclass D(B):\n    def hook(self, a): pass\n",
        [
            (
                "class demo.up.B has method hook(self, a) to override",
                "parameter a of the override is now called b",
            )
        ],
    ),
    (
        "a method that is a property by now",
        "class B:\n    def hook(self): pass\n",
        "class B:\n    @property\n    def hook(self): pass\n",
        "from demo.up import B\nclass D(B):\n    def hook(self): pass\n",
        [("class demo.up.B has method hook(self) to override", "it is now a property")],
    ),
    (
        "an override that never fitted",
        "class B:\n    def hook(self, a): pass\n",
        "class B:\n    def hook(self, a): 'Other.'\n",
        "from demo.up import B\nclass D(B):\n    def hook(self, b): pass\n",
        [],
    ),
    (
        "an override that takes everything",
        "class B:\n    def hook(self, a): pass\n",
        "class B:\n    def hook(self, a, b, *, c): pass\n",
        "from demo.up import B\nclass D(B):\n    def hook(self, a, *more, **words): pass\n",
        [],
    ),
    (
        "a method that is called through self and super",
        "class B:\n    def one(self, a): pass\n    def two(self): pass\n",
        "class B:\n    def one(self): pass\n",
        "from demo.up import B\nclass D(B):\n    def f(self):\n        self.one(1)\n        super().two()\n",
        [
            ("demo.up.B.one accepts (_)", "too many positional arguments"),
            ("class demo.up.B has method two(self)", "has two"),
        ],
    ),
    (
        "an attribute that is set for the base",
        "class B:\n    flag = False\n    def __init__(self):\n        self.mode = 1\n",
        "class B:\n    switch = False\n    def __init__(self):\n        self.way = 1\n",
        "from demo.up import B\nclass D(B):\n    flag: bool = True\n    own = 1\n"
        "    def __init__(self):\n        self.mode = 2\n        self.mine = 3\n",
        [
            ("class demo.up.B declares flag, which D sets", "no base of D declares flag"),
            ("class demo.up.B declares mode, which D sets", "no base of D declares mode"),
        ],
    ),
    (
        "a new abstract method",
        "from abc import ABC, abstractmethod\nclass B(ABC):\n    @abstractmethod\n    def one(self): ...\n",
        "from abc import ABC, abstractmethod\nclass B(ABC):\n    @abstractmethod\n    def one(self): ...\n"
        "    @abstractmethod\n    def two(self): ...\n",
        "from demo.up import B\nclass D(B):\n    def one(self): pass\n",
        [
            (
                "demo.new.D implements every abstract method of its bases",
                "two of demo.up.B is abstract and not implemented",
            )
        ],
    ),
    (
        "an abstract method of a class that is abstract itself",
        "from abc import ABC, abstractmethod\nclass B(ABC):\n    @abstractmethod\n    def one(self): ...\n",
        "from abc import ABC, abstractmethod\nclass B(ABC):\n    @abstractmethod\n    def one(self): 'It.'\n",
        "from demo.up import B\nclass D(B): pass\n",
        [],
    ),
    (
        "what a string names",
        "class C:\n    x = 1\n    def m(self): pass\n",
        "class C: pass\n",
        '"""demo.up.gone is only prose."""\nA = "demo.up.C.m"\nB = "demo.up.C"\nC = "demo.up.unknown"\n',
        [],
    ),
    (
        "what a string names, and is gone",
        "class C: pass\n",
        "class D: pass\n",
        'A = "demo.up.C"\n',
        [("demo.up.C exists", "there is no demo.up.C")],
    ),
    (
        "what a test replaces",
        "class C:\n    def m(self): pass\nx = 1\n",
        "class C:\n    def n(self): pass\ny = 1\n",
        "from unittest.mock import patch\nfrom demo import up\nfrom demo.up import C\n"
        "def test(monkeypatch):\n    monkeypatch.setattr(up, 'x', 2)\n    patch.object(C, 'm')\n"
        "    getattr(C, 'maybe', None)\n",
        [("demo.up defines x", "there is no x"), ("class demo.up.C has method m(self)", "has m")],
    ),
    (
        "an attribute that the code can do without",
        "class C:\n    x = 1\n    y = 1\n",
        "class C: pass\n",
        "from demo.up import C\ndef f(c: C):\n    g = lambda d=c.y: d\n"
        "    return c.x if hasattr(c, 'x') else g()\n",
        [("class demo.up.C has attribute y", "has y")],
    ),
    (
        "a name that is served lazily",
        "environment = {'A': 1, 'B': 2}\ndef __getattr__(name): return environment[name]\n",
        "environment = {'A': 1}\ndef __getattr__(name): return environment[name]\n",
        "import demo.up as up\nup.A\nup.B\nup.C\n",
        [("demo.up defines B", "there is no B")],
    ),
    (
        "a name that is served in a way that cannot be seen",
        "x = 1\ndef __getattr__(name): return make(name)\n",
        "def __getattr__(name): return make(name)\n",
        "from demo.up import x\n",
        [],
    ),
    (
        "a name that is bound in branches",
        "try:\n    from fast import f\nexcept ImportError:\n    def f(a): pass\n"
        "if f:\n    g = f\nelse:\n    g = None\n",
        "try:\n    from fast import f\nexcept ImportError:\n    def f(): pass\n"
        "if f:\n    g = f\nelse:\n    g = None\n",
        "from demo.up import f, g\nf(1)\ng\n",
        [("demo.up.f accepts (_)", "too many positional arguments")],
    ),
    (
        "code that Python itself cannot read",
        "def f(): pass\n",
        "def f(: pass\n",
        "from demo.up import f\nf()\n",
        [],
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "patch", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_release_that_changes(
    tmp_path: Path, old: str, new: str, patch: str, expected: list[tuple[str, str]]
) -> None:
    found = findings(tmp_path, {"demo/up.py": old}, {"demo/up.py": new}, patch)
    assert [finding.contract for finding in found] == [contract for contract, _ in expected]
    for finding, (_, said) in zip(found, expected, strict=True):
        assert said in finding.found
        assert (finding.origin, finding.path) == ("derived", NEW_FILE)
        assert finding.line is not None


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_the_same_release_breaks_nothing(tmp_path: Path, case: tuple[str, str, str, str, object]) -> None:
    assert findings(tmp_path, {"demo/up.py": case[1]}, {}, case[3]) == ()


def test_a_finding_names_line_definition_and_what_upstream_did(tmp_path: Path) -> None:
    old = "A = 1\n\n\ndef f(\n    a,\n    counts,\n):\n    return a\n\n\nB = 2\n"
    new = old.replace("    counts,\n", "").replace("A = 1", "A = 3").replace("B = 2", "B = 4")
    (found,) = findings(
        tmp_path, {"demo/up.py": old}, {"demo/up.py": new}, "from demo.up import f\n\nf(1, counts=2)\n"
    )
    assert (found.path, found.line, found.definition) == (NEW_FILE, 3, "demo/up.py:4")
    assert found.expected == "a signature that (_, counts=_) fits; on the pin (a, counts)"
    assert found.upstream_change == (
        "--- a/demo/up.py",
        "+++ b/demo/up.py",
        "@@ -4 +4 @@",
        " def f(",
        "     a,",
        "-    counts,",
        " ):",
        "     return a",
    )


def test_what_moved_is_found(tmp_path: Path) -> None:
    (found,) = findings(
        tmp_path,
        {"demo/up.py": "def f(): pass\n\n\nx = 1\n"},
        {
            "demo/up.py": "x = 1\n",
            "demo/deep/there.py": "def f(): pass\n",
            "demo/deep/__init__.py": "y = 1\n",
        },
        "from demo.up import f\nf()\n",
    )
    assert found.found == "there is no f in demo/up.py; f is now in demo/deep/there.py:1"
    assert found.consequences == ("demo.up.f accepts ()",)
    assert "-def f(): pass" in found.upstream_change


def test_what_moved_is_found_by_a_git_without_perls_expressions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    refusing = programs / "git"
    refusing.write_text(
        '#!/bin/sh\nfor word; do\n  test "$word" != -P || { echo "fatal: no -P" >&2; exit 128; }\ndone\n'
        f'exec {git_program()} "$@"\n'
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    git_program.cache_clear()
    try:
        test_what_moved_is_found(tmp_path / "project")
    finally:
        git_program.cache_clear()


def test_a_module_that_is_gone_is_one_finding(tmp_path: Path) -> None:
    (found,) = findings(
        tmp_path,
        {"demo/up.py": "class B:\n    def hook(self): pass\n    def other(self): pass\n"},
        {"demo/up.py": "", "demo/over.py": "class B: pass\n"},
        "from demo.up import B\n\n\nclass D(B):\n    def hook(self):\n        return self.other()\n",
    )
    assert (found.contract, found.line) == ("module demo.up exists", 1)
    assert found.found == "there is no such module; B is now in demo/over.py:1"
    assert set(found.consequences) == {
        "demo.up defines B",
        "demo.new.D implements every abstract method of its bases",
        "class demo.up.B has method hook(self) to override",
        "class demo.up.B has method other(self)",
    }
    assert found.upstream_change[:2] == ("--- a/demo/up.py", "+++ /dev/null")


def test_a_base_that_is_gone_takes_its_hooks_along(tmp_path: Path) -> None:
    old = {"demo/up.py": "class A:\n    def deep(self): pass\n\n\nclass B(A):\n    def hook(self): pass\n"}
    (found,) = findings(
        tmp_path,
        old,
        {"demo/up.py": "class A:\n    def deep(self): pass\n"},
        "from demo.up import B\n\n\nclass D(B):\n    def hook(self):\n        return self.deep()\n",
    )
    assert found.contract == "demo.up defines B"
    assert "class demo.up.B has method hook(self) to override" in found.consequences
    assert "class demo.up.A has method deep(self)" in found.consequences


def test_re_exports_are_followed(tmp_path: Path) -> None:
    old = {
        "demo/up.py": "from .inner import *\nfrom .other import f as g\n",
        "demo/inner.py": "class C:\n    x = 1\n",
        "demo/other.py": "def f(a): pass\n",
    }
    patch = "from demo.up import C, g\nC.x\ng(1)\n"
    moved = {
        "demo/up.py": "from .deep import C, g\n",
        "demo/deep.py": "class C:\n    x = 1\ndef g(a): pass\n",
    }
    assert findings(tmp_path / "kept", old, moved, patch) == ()
    broken = {"demo/inner.py": "class C: pass\n", "demo/other.py": "def f(): pass\n"}
    found = findings(tmp_path / "broken", old, broken, patch)
    assert {finding.contract for finding in found} == {
        "class demo.inner.C has attribute x",
        "demo.other.f accepts (_)",
    }


def test_only_the_lines_of_the_patch_count(tmp_path: Path) -> None:
    old = "import os\nfrom demo.low import used, unused\n\n\ndef f():\n    unused()\n    return 1\n"
    low = "def used(): pass\ndef unused(): pass\n"
    patch = {"demo/up.py": old.replace("return 1", "return used(), os.sep")}
    files = {"demo/up.py": old, "demo/low.py": low}
    assert findings(tmp_path / "unused", files, {"demo/low.py": "def used(): pass\n"}, patch) == ()
    (found,) = findings(tmp_path / "used", files, {"demo/low.py": "def unused(): pass\n"}, patch)
    assert found.contract == "demo.low defines used"
    assert found.path == "demo/up.py"
    without = old.replace("used, unused", "unused")
    (found,) = findings(tmp_path / "import", files, {"demo/up.py": without}, patch)
    assert found.contract == "demo.up defines used"
    assert "-from demo.low import used, unused" in found.upstream_change


def test_an_attribute_of_the_class_that_the_patch_extends(tmp_path: Path) -> None:
    old = "class C:\n    def __init__(self):\n        self.width = 1\n\n    def f(self):\n        return 1\n"
    patch = {"demo/up.py": old.replace("return 1", "return self.width")}
    new = old.replace("self.width", "self.size")
    (found,) = findings(tmp_path, {"demo/up.py": old}, {"demo/up.py": new}, patch)
    assert found.contract == "class demo.up.C has attribute width"
    assert found.upstream_change[-2:] == ("-        self.width = 1", "+        self.size = 1")


def test_what_the_patch_defines_itself_is_no_contract(tmp_path: Path) -> None:
    patch = (
        "def own(a): pass\n\n\nclass Own:\n    x = 1\n    def m(self):\n"
        "        own(1)\n        return self.x\n"
    )
    place = place_of(
        tmp_path,
        {"demo/up.py": "x = 1\n"},
        {},
        {NEW_FILE: patch, "demo/test.py": "from demo.new import own\n"},
    )
    assert list_contracts(place) == ()


def test_a_patch_that_conflicts_is_checked_with_its_new_files(tmp_path: Path) -> None:
    old = {"demo/up.py": "def f(a):\n    return 1\n", "demo/low.py": "def g(a): pass\ndef h(): pass\n"}
    patch = {
        "demo/up.py": "def f(a, b=2):\n    return b\n",
        NEW_FILE: "from demo.low import g, h\nfrom demo.up import f\nf(1, b=2)\nf(1)\ng(1)\nh()\n",
    }
    new = {"demo/up.py": "def f(a):\n    return 3\n", "demo/low.py": "def g(): pass\ndef h(): pass\n"}
    place = place_of(tmp_path, old, new, patch)
    assert place.new_after is None
    # f's parameter b is what the patch would have added: only g is upstream's doing.
    assert [finding.contract for finding in check_contracts(place)] == ["demo.low.g accepts (_)"]


def test_what_an_earlier_patch_defines_is_a_contract(tmp_path: Path) -> None:
    old: dict[str, str | bytes] = {"demo/__init__.py": "", "demo/low.py": "x = 1\n"}
    releases = TwoReleases(tmp_path, old, {**old, "demo/low.py": "x = 3\n"})
    releases.add_patch({"demo/low.py": "x = 2\ny = x\n"}, "[Demo] Add y")
    releases.add_patch({NEW_FILE: "from demo.low import y\n"}, "[Demo] Use y")
    first, second = releases.places()
    assert first.new_before == second.new_before, "the first patch conflicts"
    assert [finding.contract for finding in check_contracts(second)] == ["demo.low defines y"]


def test_a_renamed_file_is_followed(tmp_path: Path) -> None:
    body = "".join(f"def function_{n}():\n    return {n}\n\n\n" for n in range(20))
    patch = {"demo/up.py": body.replace("return 7\n", "return function_3()\n")}
    moved = {"demo/up.py": "", "demo/deep/moved.py": body}
    place = place_of(tmp_path / "kept", {"demo/up.py": body}, moved, patch)
    assert check_contracts(place) == ()
    without = {"demo/up.py": "", "demo/deep/moved.py": body.replace("function_3", "function_three")}
    place = place_of(tmp_path / "broken", {"demo/up.py": body}, without, patch)
    (found,) = check_contracts(place)
    assert (found.contract, found.found) == (
        "demo.up defines function_3",
        "there is no function_3 in demo/deep/moved.py",
    )


def test_all_that_a_patch_relies_on_is_listed(tmp_path: Path) -> None:
    up = "class B:\n    def hook(self): pass\n"
    place = place_of(
        tmp_path,
        {"demo/up.py": up},
        {},
        {NEW_FILE: "from demo.up import B\nclass D(B):\n    def hook(self): pass\n"},
    )
    assert [(one.contract, one.line) for one in list_contracts(place)] == [
        ("module demo.up exists", 1),
        ("demo.up defines B", 1),
        ("demo.new.D implements every abstract method of its bases", 2),
        ("class demo.up.B has method hook(self) to override", 3),
    ]
