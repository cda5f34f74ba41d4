"""Contracts that people write: each kind kept and broken, in series.toml, in lint, and through refresh."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import tomlkit
from contractkit import findings, place_of
from pydantic import TypeAdapter
from stackproject import message

from vllm_stack.contracts import Contract, check_contracts, list_contracts
from vllm_stack.contracts.resolve import Resolver
from vllm_stack.contracts.tree import SourceTree
from vllm_stack.contracts.written import check_written
from vllm_stack.errors import UsageError
from vllm_stack.series import SeriesEntry, parse_series, with_patches

if TYPE_CHECKING:
    from pathlib import Path

    from stackproject import Project

UP = """\
from enum import Enum


class Base:
    def __init__(self):
        self.width = 1


class Kind(Enum):
    A = 1
    B = 2


class C(Base):
    flag = True

    def method(self, a, *, b=1):
        if a:
            return [1, self.width]
        elif b == 2:
            self.call(a, b=b)
        else:
            self.call(b)
            while a:
                self.rest()
        return None


def function(a, /, b, *, c=1, **rest):
    pass


LIMIT = 3
"""
CONTRACT: TypeAdapter[Contract] = TypeAdapter(Contract)
FIRST = "0100-demo-topic-return-a-hundred.patch"

#: Contract, text that is replaced in upstream's module, what by, and what is then found (None: it holds).
CASES: list[tuple[dict[str, Any], str, str, str | None]] = [
    (
        {"kind": "function", "name": "function"},
        "def function",
        "def other",
        "there is no function in demo/up.py",
    ),
    ({"kind": "function", "name": "function"}, "c=1", "d=1", None),
    (
        {"kind": "function", "name": "function", "signature": "(a, /, b, *, c=..., **rest)"},
        "c=1",
        "d=1",
        "parameter c is gone; parameter d is new; the signature is (a, /, b, *, d=1, **rest)",
    ),
    ({"kind": "function", "name": "function", "signature": "(a, /, b, *, c=2, **rest)"}, "c=1", "c=3", None),
    (
        {"kind": "function", "name": "function", "signature": "(a, /, b, *, c=..., **rest)"},
        "c=1",
        "c",
        "the signature is (a, /, b, *, c, **rest)",
    ),
    ({"kind": "function", "name": "function", "accepts": "(_, _, x=_)"}, "b, *", "b=1, *", None),
    (
        {"kind": "function", "name": "function", "accepts": "(_, b=_)"},
        "a, /, b, *",
        "a, /, *",
        None,
    ),
    (
        {"kind": "function", "name": "function", "accepts": "(_, _)"},
        "a, /, b, *",
        "a, /, *",
        "too many positional arguments; the signature is now (a, /, *, c=1, **rest)",
    ),
    (
        {"kind": "function", "name": "C.method", "signature": "(self, a, *, b=...)", "accepts": "(_, b=_)"},
        "*, b=1",
        "b=1",
        "the signature is (self, a, b=1)",
    ),
    ({"kind": "class", "name": "C", "bases": ["Base"]}, "C(Base)", "C(Other)", "Base is no base of C"),
    ({"kind": "class", "name": "C", "bases": ["Base"]}, "class Base:", "class Base(object):", None),
    (
        {"kind": "class", "name": "Kind", "bases": ["enum.Enum"]},
        "Kind(Enum)",
        "Kind(str)",
        "enum.Enum is no base",
    ),
    (
        {"kind": "class", "name": "C", "methods": ["method"]},
        "def method",
        "def methods",
        "has no method method",
    ),
    (
        {"kind": "class", "name": "C", "methods": ["method(self, a, *, b=...)"]},
        "def method(self, a",
        "def method(self, x",
        "parameter a is gone; parameter x is new",
    ),
    (
        {"kind": "class", "name": "C", "attributes": ["flag", "width"]},
        "self.width = 1",
        "self.w = 1",
        "no attribute width",
    ),
    ({"kind": "enum", "name": "Kind", "members": ["A", "B"]}, "B = 2", "C = 2", "has no member B"),
    (
        {"kind": "enum", "name": "Kind", "lacks": ["C"]},
        "B = 2",
        "B = 2\n    C = 3",
        "Kind has a member C (demo/up.py:12)",
    ),
    (
        {"kind": "enum", "name": "Kind", "members": ["A"]},
        "Kind(Enum)",
        "Kind",
        "Kind in demo/up.py:9 is not an enum",
    ),
    ({"kind": "name", "name": "LIMIT"}, "LIMIT", "BOUND", "there is no LIMIT in demo/up.py"),
    ({"kind": "name", "name": "C.flag"}, "flag", "mark", "there is no C.flag"),
    ({"kind": "name", "name": "BOUND", "absent": True}, "LIMIT", "BOUND", "BOUND is defined in demo/up.py"),
    (
        {
            "kind": "call",
            "function": "C.method",
            "branch": ["b == 2"],
            "callee": "self.call",
            "arguments": ["a", "b=b"],
        },
        "elif b == 2",
        "elif b == 3",
        "no branch `b == 2`, but one `b == 3`; it stands under: else a > b == 3",
    ),
    (
        {
            "kind": "call",
            "function": "C.method",
            "branch": ["b==(2)"],
            "callee": "self.call",
            "arguments": ["a"],
        },
        "self.call(a, b=b)",
        "self.call(b=b)",
        "there is self.call(b=b); there is self.call(b)",
    ),
    (
        {
            "kind": "call",
            "function": "C.method",
            "branch": ["else a", "else b == 2", "a"],
            "callee": "self.rest",
        },
        "self.rest()",
        "self.rests()",
        "self.rest is not there in C.method (demo/up.py:17)",
    ),
    (
        {"kind": "call", "function": "C.method", "branch": ["a"], "callee": "self.rest"},
        "            while a:",
        "            while b:",
        "it stands under: else a > else b == 2 > b",
    ),
    ({"kind": "call", "function": "C.method", "callee": "self.call"}, "flag", "mark", None),
    (
        {"kind": "call", "function": "C.method", "callee": "self.call"},
        "def method",
        "def methods",
        "there is no function C.method in demo/up.py",
    ),
    (
        {"kind": "expression", "function": "C.method", "branch": ["a"], "contains": "self . width"},
        "[1, self.width]",
        "[1]",
        "self.width is not there",
    ),
    (
        {"kind": "expression", "function": "C.method", "contains": "[1, self.width]"},
        "if a:",
        "if not a:",
        None,
    ),
]


#: Contracts that were never true, and why.
UNTRUE: list[tuple[dict[str, Any], str]] = [
    ({"kind": "function", "name": "C"}, "C in demo/up.py:14 is not a function"),
    ({"kind": "class", "name": "function"}, "function in demo/up.py:29 is not a class"),
    ({"kind": "enum", "name": "C", "members": ["flag"]}, "C in demo/up.py:14 is not an enum"),
    ({"kind": "name", "name": "LIMIT", "absent": True}, "LIMIT is defined in demo/up.py:33"),
    ({"kind": "name", "name": "A", "module": "demo.no"}, "there is no module demo.no"),
]


def look(contract: dict[str, Any], text: str) -> str | None:
    """Return what is found instead of a contract in a tree whose only module is ``demo.up``."""
    files = {"demo/up.py": text.encode(), "demo/__init__.py": b""}
    blobs = {path: hashlib.sha1(data).hexdigest() for path, data in files.items()}  # noqa: S324 - an id
    tree = SourceTree(blobs, {blobs[path]: data for path, data in files.items()}.__getitem__)
    written = CONTRACT.validate_python({"module": "demo.up", **contract})
    return check_written(written, Resolver(tree)).found


@pytest.mark.parametrize(("contract", "old", "new", "expected"), CASES)
def test_each_kind(contract: dict[str, Any], old: str, new: str, expected: str | None) -> None:
    assert old in UP
    assert look(contract, UP) is None
    found = look(contract, UP.replace(old, new))
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert expected in found


@pytest.mark.parametrize(("contract", "expected"), UNTRUE)
def test_what_was_never_true(contract: dict[str, Any], expected: str) -> None:
    assert look(contract, UP) == expected


@pytest.mark.parametrize("absent", [False, True])
def test_files(tmp_path: Path, absent: bool) -> None:
    contract = {"kind": "file", "path": "demo/data.bin", "absent": absent}
    there, gone = {"demo/data.bin": "x\n"}, {"demo/data.bin": ""}
    patch = {"demo/new.py": "x = 1\n"}
    if absent:
        (found,) = findings(tmp_path, {}, there, patch, (contract,))
        assert (found.contract, found.found) == (
            "file demo/data.bin does not exist",
            "there is file demo/data.bin",
        )
    else:
        (found,) = findings(tmp_path, there, gone, patch, (contract,))
        assert (found.contract, found.found) == (
            "file demo/data.bin exists",
            "there is no file demo/data.bin",
        )


def test_a_broken_one_says_why_it_matters_and_what_upstream_did(tmp_path: Path) -> None:
    contract = {
        "kind": "call",
        "module": "demo.up",
        "function": "C.method",
        "branch": ["b == 2"],
        "callee": "self.call",
        "why": "the hook is called there",
    }
    new = UP.replace("self.call(a, b=b)", "self.other(a, b=b)").replace("LIMIT = 3", "LIMIT = 4")
    (found,) = findings(
        tmp_path, {"demo/up.py": UP}, {"demo/up.py": new}, {"demo/new.py": "x = 1\n"}, (contract,)
    )
    assert found.contract == "demo.up.C.method, in the branch `b == 2` calls self.call(...)"
    assert (found.origin, found.path, found.line, found.why) == (
        "series",
        "series.toml",
        None,
        "the hook is called there",
    )
    assert found.upstream_change[2:] == (
        "@@ -21 +21 @@",
        "-            self.call(a, b=b)",
        "+            self.other(a, b=b)",
    )


def test_before_and_after_the_patch(tmp_path: Path) -> None:
    lacks = {"kind": "enum", "module": "demo.up", "name": "Kind", "lacks": ["NEW"], "when": "before"}
    has = {"kind": "enum", "module": "demo.up", "name": "Kind", "members": ["NEW"]}
    patch = {"demo/up.py": UP.replace("    B = 2\n", "    B = 2\n    NEW = 3\n")}
    kept = UP.replace("LIMIT = 3", "LIMIT = 4")
    place = place_of(tmp_path / "kept", {"demo/up.py": UP}, {"demo/up.py": kept}, patch, (lacks, has))
    assert check_contracts(place) == ()
    assert [one.contract for one in list_contracts(place)] == [
        "enum demo.up.Kind has no member NEW",
        "enum demo.up.Kind has members NEW",
    ]
    taken = UP.replace("    A = 1\n", "    NEW = 0\n    A = 1\n")
    (found,) = findings(tmp_path / "taken", {"demo/up.py": UP}, {"demo/up.py": taken}, patch, (lacks, has))
    assert found.found == "Kind has a member NEW (demo/up.py:10)"


def test_what_a_conflicting_patch_would_add_is_not_missed(tmp_path: Path) -> None:
    has = {"kind": "enum", "module": "demo.up", "name": "Kind", "members": ["NEW"]}
    patch = {"demo/up.py": UP.replace("    B = 2\n", "    B = 2\n    NEW = 3\n")}
    new = UP.replace("    B = 2\n", "    B = 5\n")
    place = place_of(tmp_path, {"demo/up.py": UP}, {"demo/up.py": new}, patch, (has,))
    assert place.new_after is None
    assert check_contracts(place) == ()


SERIES = """\
schema = 1

[[topics]]
name = "demo-topic"
numbers = [100, 199]
title = "Demo"

[[patches]]
file = "0100-demo-topic-one.patch"
topic = "demo-topic"
test = "true"

# Kept as it is written.
[[patches.contracts]]
kind = "name"
module = "demo.core"
name = "function_1" # the first
why = "it is called"

[[patches.contracts]]
kind = "file"
path = "setup.py"

[[patches]]
file = "0101-demo-topic-two.patch"
topic = "demo-topic"
test = "true"
"""


def test_they_survive_a_change_of_the_series() -> None:
    series = parse_series(SERIES, source="x")
    assert [len(entry.contracts) for entry in series.patches] == [2, 0]
    assert with_patches(SERIES, list(series.patches)) == SERIES
    swapped = with_patches(SERIES, [series.patches[1], series.patches[0]])
    assert parse_series(swapped, source="x").patches == (series.patches[1], series.patches[0])
    assert "# Kept as it is written." in swapped
    assert "# the first" in swapped


def test_a_new_entry_brings_its_own() -> None:
    series = parse_series(SERIES, source="x")
    renamed = SeriesEntry(
        file="0102-demo-topic-three.patch",
        topic="demo-topic",
        test="true",
        contracts=series.patches[0].contracts,
    )
    text = with_patches(SERIES, [series.patches[1], renamed])
    assert parse_series(text, source="x").patches == (series.patches[1], renamed)
    assert tomlkit.parse(text)["patches"][1]["contracts"][1] == {"kind": "file", "path": "setup.py"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "name"', 'kind = "names"', "does not match any of the expected tags"),
        ('kind = "name"\n', "", "Unable to extract tag"),
        ('why = "it is called"', "lines = 3", "Extra inputs are not permitted"),
        ('name = "function_1"', 'name = "function 1"', "should match pattern"),
        ('path = "setup.py"', 'path = "../setup.py"', "below the root"),
        ('why = "it is called"', 'when = "later"', "'before' or 'after'"),
        ('kind = "name"', 'kind = "function"\nsignature = "a, b"', "not a parameter list"),
        ('kind = "name"', 'kind = "function"\naccepts = "(a=1, 2)"', "not an argument list"),
        ('kind = "name"', 'kind = "class"\nmethods = ["f(a"]', "not a parameter list"),
        ('kind = "name"', 'kind = "enum"', "give members, lacks or both"),
        (
            'kind = "name"\nmodule = "demo.core"\nname = "function_1"',
            'kind = "call"\nmodule = "a"\nfunction = "f"\ncallee = "f()"',
            "pattern",
        ),
        (
            'kind = "name"\nmodule = "demo.core"\nname = "function_1"',
            'kind = "expression"\nmodule = "a"\nfunction = "f"\nbranch = ["if a"]\ncontains = "x"',
            "not an expression",
        ),
    ],
)
def test_one_that_is_not_valid_is_named(old: str, new: str, said: str) -> None:
    assert old in SERIES
    with pytest.raises(UsageError) as caught:
        parse_series(SERIES.replace(old, new, 1), source="series.toml")
    (detail,) = caught.value.details
    assert detail.startswith("patches.0.contracts.")
    assert said in detail


def write_contract(project: Project, text: str) -> None:
    """Add a contract to the first patch of the project's series."""
    series = project.series.read_text()
    marker = 'test = "true"\n' if 'test = "true"\n' in series else '\n\n[[patches]]\nfile = "0101'
    head, found, rest = series.partition(marker)
    assert found
    addition = f"\n\n[[patches.contracts]]\n{text}"
    project.series.write_text(f"{head}{addition.rstrip()}{found}{rest}")


TRUE = 'kind = "name"\nmodule = "demo.core"\nname = "function_1" # called\n'


def test_lint_counts_them_and_finds_one_that_is_false(stacked: Project) -> None:
    write_contract(stacked, TRUE)
    done = stacked.ok("lint")
    assert "contracts: 0 derived, 1 written" in done.out
    contracts = done.report["targets"][0]["contracts"]
    assert contracts[0]["patch"] == FIRST
    assert contracts[0]["contracts"][0]["contract"] == "demo.core defines function_1"
    write_contract(stacked, 'kind = "name"\nmodule = "demo.core"\nname = "function_99"\n')
    done = stacked.run("lint")
    assert done.code == 6
    (found,) = done.report["targets"][0]["findings"]
    assert (found["code"], found["level"], found["patch"]) == ("contract", "error", FIRST)
    said = "not true of 1.0.0: demo.core defines function_99: there is no function_99 in demo/core.py"
    assert found["message"] == said


def test_lint_says_when_it_could_not_look(stacked: Project, tmp_path: Path) -> None:
    write_contract(stacked, TRUE)
    (stacked.root / "cache" / "bases").rename(tmp_path / "bases")
    done = stacked.ok("lint")
    (found,) = done.report["targets"][0]["findings"]
    assert (found["code"], found["level"]) == ("contract-unchecked", "note")
    assert done.report["targets"][0]["contracts"] is None


def test_refresh_keeps_them(stacked: Project) -> None:
    write_contract(stacked, TRUE)
    stacked.ok("apply")
    stacked.edit("demo/other.py", "VALUE = 1", "VALUE = 2")
    stacked.commit(message("[Core] Another patch"))
    before = stacked.series.read_text()
    stacked.ok("refresh")
    after = stacked.series.read_text()
    assert after != before
    assert 'name = "function_1" # called\n' in after
    assert len(stacked.stack.series.patches[0].contracts) == 1
