"""``explain``: what upstream did to the places of a patch and to what it imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from stackproject import FILES, GENERATED, Project, make_sdist, message
from upstreamrepo import Upstream, pin_git

from vllm_stack.importing import Import, Sources, imports_of

if TYPE_CHECKING:
    from pathlib import Path

BACKEND = '''"""Backends."""

import os
from .names import NAME as HANDED_ON


class Base:
    """All backends."""

    def forward(self, query):
        return query


class Other:
    pass


if os.name == "posix":
    LIMIT = 8
'''
UPSTREAM: dict[str, str] = {
    **FILES,
    "demo/backend.py": BACKEND,
    "demo/names.py": 'NAME = "demo"\n',
    "demo/gone.py": "def helper():\n    return 1\n",
    "demo/long_name.py": "".join(f"VALUE_{n} = {n}\n" for n in range(9)),
}
OURS = """from demo import backend, core
from demo.backend import HANDED_ON, LIMIT, Base, Other
from demo.gone import helper
from .long_name import VALUE_3
import demo.other
import numpy
"""


@pytest.fixture
def imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """A project whose patch adds a file with imports and changes another."""
    project = Project(tmp_path / "a stack", capsys, files=dict(UPSTREAM))
    project.ok("apply")
    project.write("demo/ours.py", OURS)
    project.edit("demo/core.py", "return 1\n", "return 100\n")
    project.edit("demo/core.py", "return 5\n", "return 500\n")
    project.edit("demo/core.py", "return 9\n", "return 900\n")
    project.commit(message("[Demo] Add a file"))
    project.ok("refresh")
    return project


def next_release(project: Project, files: dict[str, str]) -> str:
    """Write the sdist of demo 2.0.0 and return its path."""
    path = project.root / "demo-2.0.0.tar.gz"
    metadata = {"PKG-INFO": "Metadata-Version: 2.4\nName: demo\nVersion: 2.0.0\n"}
    make_sdist(path, {**files, **GENERATED, **metadata}, top="demo-2.0.0")
    return str(path)


def explain(project: Project, files: dict[str, str]) -> tuple[dict[str, Any], str]:
    before = project.patches()
    done = project.ok("explain", "0100", "--to", next_release(project, files), "--offline")
    assert project.patches() == before
    explanation: dict[str, Any] = done.report["explanation"]
    return explanation, done.out


def test_all_places_are_shown_those_that_apply_as_well(imports: Project) -> None:
    core = UPSTREAM["demo/core.py"].replace("return 5\n", "return 55\n")
    core = "# head\n" + core.replace("def function_9", "# said\ndef function_9")
    explanation, out = explain(imports, {**UPSTREAM, "demo/core.py": core})
    assert (explanation["old_release"], explanation["new_release"]) == ("1.0.0", "2.0.0")
    assert explanation["outcome"] == "conflict"
    file = next(file for file in explanation["files"] if file["path"] == "demo/core.py")
    assert [hunk["outcome"] for hunk in file["hunks"]] == ["applies", "conflict", "applies"]
    assert [bool(hunk["upstream_change"]) for hunk in file["hunks"]] == [False, True, True]
    assert "from 1.0.0 to 2.0.0: conflict\n" in out
    assert "hunk 1, line 3, now 4: applies; upstream left the place as it was\n" in out
    assert "in conflict, see below; upstream:\n" in out
    assert "    | + # said\n" in out
    assert "conflict: 0100-demo-topic-add-a-file.patch hunk 2 of demo/core.py:" in out
    assert "file: demo/ours.py: added\n" in out


def test_what_upstream_did_to_imported_definitions(imports: Project) -> None:
    backend = BACKEND.replace("def forward(self, query)", "def forward(self, query, key)")
    backend = backend.replace("class Other:\n    pass\n", "")
    files = {**UPSTREAM, "demo/backend.py": backend}
    del files["demo/gone.py"]
    files["demo/renamed.py"] = files.pop("demo/long_name.py")
    explanation, out = explain(imports, files)
    modules = {module["path"]: module for module in explanation["imports"]}
    assert sorted(modules) == [
        "demo/backend.py",
        "demo/core.py",
        "demo/gone.py",
        "demo/long_name.py",
        "demo/names.py",
        "demo/other.py",
    ]
    names = {name["name"]: name for name in modules["demo/backend.py"]["names"]}
    assert {name: found["change"] for name, found in names.items()} == {
        "Base": "changed",
        "LIMIT": "unchanged",
        "Other": "gone",
        "backend": "unchanged",
    }
    assert "+    def forward(self, query, key):" in names["Base"]["upstream_change"]
    assert names["Base"]["line"] == 7
    assert modules["demo/gone.py"]["new_path"] is None
    assert [name["change"] for name in modules["demo/gone.py"]["names"]] == ["gone"]
    assert modules["demo/long_name.py"]["new_path"] == "demo/renamed.py"
    assert modules["demo/names.py"]["names"][0]["name"] == "HANDED_ON"
    assert "imports: demo/backend.py: +1 -3 lines\n" in out
    assert "imports: demo/gone.py: not there any more\n" in out
    assert "imports: demo/long_name.py: now demo/renamed.py, +0 -0 lines\n" in out
    assert "Base, defined at line 7; upstream:\n" in out
    assert "gone: Other\n" in out
    assert "unchanged: LIMIT, backend\n" in out


def test_a_file_that_is_gone_is_not_said_to_be_unchanged(imports: Project) -> None:
    files = {path: text for path, text in UPSTREAM.items() if path != "demo/core.py"}
    explanation, out = explain(imports, files)
    assert explanation["outcome"] == "conflict"
    assert "file: demo/core.py: deleted\n" in out
    assert "hunk 1, line 3: in conflict, see below; the file is not there\n" in out
    assert "left the place" not in out


def test_the_same_release_has_nothing_to_explain(imports: Project) -> None:
    explanation, out = explain(imports, UPSTREAM)
    assert explanation["outcome"] == "strict"
    assert all(not hunk["upstream_change"] for file in explanation["files"] for hunk in file["hunks"])
    assert all(name["change"] == "unchanged" for item in explanation["imports"] for name in item["names"])
    assert "conflict" not in out


def test_earlier_patches_are_carried_over_first(stacked: Project) -> None:
    stacked.ok("apply")
    stacked.edit("demo/new.py", "NEW = True\n", "NEW = False\n")
    stacked.commit(message("[Second] Change the new module", topic="second"))
    stacked.ok("refresh")
    done = stacked.ok("explain", "0201", "--to", next_release(stacked, FILES), "--offline")
    assert done.report["explanation"]["outcome"] == "strict"
    # A patch in the middle that conflicts leaves the later ones without its files.
    files = {**FILES, "tests/test_core.py": "def test_core():\n    assert 1\n", "demo/new.py": "THEIRS\n"}
    done = stacked.ok("explain", "0201", "--to", next_release(stacked, files), "--offline")
    (file,) = done.report["explanation"]["files"]
    assert file["path"] == "demo/new.py"
    assert file["conflicting"]


def test_a_malformed_patch_has_only_its_faults(stacked: Project) -> None:
    file = stacked.patch_file("0100-demo-topic-return-a-hundred.patch")
    file.write_bytes(file.read_bytes().replace(b"@@ -3,7 +3,7 @@", b"@@ -3,7 +3,9 @@"))
    done = stacked.ok("explain", "0100", "--to", next_release(stacked, FILES), "--offline")
    explanation = done.report["explanation"]
    assert (explanation["outcome"], explanation["files"]) == ("malformed", [])
    assert "header says -7 +9 lines" in explanation["messages"][0]


def test_with_a_git_source_the_commits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upstream = Upstream(tmp_path / "upstream", dict(UPSTREAM))
    upstream.tag("1.0.0")
    upstream.edit("demo/core.py", "return 7\n", "return 70\n", "[Core] Elsewhere (#2)")
    guilty = upstream.edit("demo/core.py", "return 5\n", "return 55\n", "[Core] Change five (#3)")
    near = upstream.edit("demo/core.py", "def function_9", "# said\ndef function_9", "[Core] Say it (#4)")
    base = upstream.edit("demo/backend.py", "(self, query)", "(self, query, key)", "[API] Take a key (#5)")
    upstream.git("tag", "next")
    project = Project(tmp_path / "a stack", capsys, files=dict(UPSTREAM))
    pin_git(project, upstream.url)
    project.ok("apply")
    project.write("demo/ours.py", OURS)
    for number in (1, 5, 9):
        project.edit("demo/core.py", f"return {number}\n", f"return {number}00\n")
    project.commit(message("[Demo] Add a file"))
    project.ok("refresh")
    done = project.ok("explain", "0100", "--to", "next", "--source", "git")
    explanation = done.report["explanation"]
    file = next(file for file in explanation["files"] if file["path"] == "demo/core.py")
    assert [[commit["id"] for commit in hunk["commits"]] for hunk in file["hunks"]] == [[], [guilty], [near]]
    assert file["hunks"][1]["commits"][0]["pull_request"] == 3
    module = next(module for module in explanation["imports"] if module["path"] == "demo/backend.py")
    changed = next(name for name in module["names"] if name["name"] == "Base")
    assert [commit["id"] for commit in changed["commits"]] == [base]
    for commit, number, subject in ((guilty, 3, "[Core] Change five"), (base, 5, "[API] Take a key")):
        assert f"note: upstream {commit[:12]} (#{number}, 2020-09-13): {subject}\n" in done.out
    assert "Elsewhere" not in done.out


@pytest.mark.parametrize(
    ("name", "said"),
    [("0999", "no patch is called 0999"), ("0", "0 can be 3 patches"), ("", "no patch is called")],
)
def test_a_patch_has_to_be_named(stacked: Project, name: str, said: str) -> None:
    done = stacked.run("explain", name, "--to", next_release(stacked, FILES), "--offline")
    assert done.code == 2
    assert said in done.error["message"]
    assert any("0100-demo-topic-return-a-hundred.patch" in line for line in done.error["details"])


def test_a_patch_may_be_named_by_its_path(stacked: Project) -> None:
    path = str(stacked.patch_file("0200-second-return-nine-hundred.patch"))
    done = stacked.ok("explain", path, "--to", next_release(stacked, FILES), "--offline")
    assert done.report["explanation"]["patch"] == "0200-second-return-nine-hundred.patch"


def test_imports_are_read_wherever_they_stand() -> None:
    text = b"""
import a.b as c, d
from ..up import one as two, three
from . import beside
if True:
    from e import *
def f():
    import late
"""
    assert set(imports_of(text, "pkg/sub/file.py")) == {
        Import("a.b"),
        Import("d"),
        Import("pkg.up", "one"),
        Import("pkg.up", "three"),
        Import("pkg.sub", "beside"),
        Import("e", "*"),
        Import("late"),
    }
    assert imports_of(b"def broken(:\n", "x.py") == ()
    assert imports_of(b"null\0byte\n", "x.py") == ()
    assert imports_of(b'x = "\\d"\nimport y\n', "x.py") == (Import("y"),)


def test_names_that_modules_hand_on_in_a_circle_are_given_up(project: Project) -> None:
    from tworeleases import commit_files  # noqa: PLC0415

    git = project.base.git
    files = {"p/__init__.py": "", "p/a.py": "from p.b import X\n", "p/b.py": "from p.a import X\n"}
    sources = Sources(git, commit_files(git, files, "x"))
    assert sources.locate(Import("p.a", "X")) is None
    assert sources.locate(Import("elsewhere", "X")) is None
    assert sources.locate(Import("p.a", "Y")) is not None
