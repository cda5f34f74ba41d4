"""Overlay wheels, on small wheels that are made as upstream's are."""

from __future__ import annotations

import ast
import email
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installer.sources import WheelFile
from packaging.metadata import Metadata
from packaging.version import Version
from wheel.wheelfile import WheelFile as ReferenceWheelFile  # type: ignore[import-untyped]
from wheelkit import (
    ARCH,
    BUILT,
    CHANGES,
    INFO,
    METADATA,
    SOURCES,
    TAG,
    VERSION_MODULE,
    Kit,
    change,
    elf,
    make_wheel,
    read_wheel,
    record_row,
)

from vllm_stack.errors import BuildError, IntegrityError
from vllm_stack.overlay import build_overlay, select_package_changes
from vllm_stack.record import Digest, parse_record
from vllm_stack.verify import Verifier, WheelContents
from vllm_stack.wheelmeta import read_version_module, rewrite_version_module, with_change_notice
from vllm_stack.wheelzip import WheelArchive

if TYPE_CHECKING:
    from vllm_stack.overlay import FileChange

DIST_INFO = "demo-1.0.0+bw.1.dist-info"
TOOLS = Path(__file__).parents[1]
NOTICE_LINE = b"# Modified for 1.0.0+bw.1 (vLLM Blackwell stack) by 0100-demo-change.patch.\n"


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit.make(tmp_path_factory.mktemp("official"))


@pytest.fixture(scope="session")
def wheel(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.build(tmp_path_factory.mktemp("patched")).path


@pytest.fixture(scope="session")
def members(wheel: Path) -> dict[str, bytes]:
    return read_wheel(wheel)


def test_the_result_says_what_was_done(kit: Kit, tmp_path: Path) -> None:
    result = kit.build(tmp_path)
    assert result.path == tmp_path / f"demo-1.0.0+bw.1-{TAG}.whl"
    assert result.size == result.path.stat().st_size
    assert result.changed == ("demo/core.py", "demo/crlf.py", "demo/data/config.json", "demo/no_newline.py")
    assert result.added == ("demo/new.py",)
    assert result.removed == ("demo/old.py",)
    assert result.path.stat().st_mode & 0o777 == 0o644


def test_only_what_the_stack_changes_is_changed(kit: Kit, members: dict[str, bytes]) -> None:
    official = read_wheel(kit.official)
    touched = {item.path for item in CHANGES} | {"demo/_version.py"}
    for name in official.keys() - touched:
        if name.startswith("demo/"):
            assert members[name] == official[name]
    assert "demo/old.py" not in members
    assert members["demo/new.py"] == b"NEW = True\n"
    package = {name for name in members if name.startswith("demo/")}
    assert package == {name for name in official if name.startswith("demo/")} - {"demo/old.py"} | {
        "demo/new.py"
    }


def test_unchanged_members_keep_their_compressed_bytes(kit: Kit, wheel: Path) -> None:
    touched = {item.path for item in CHANGES} | {"demo/_version.py"}
    with WheelArchive.open(kit.official) as old, WheelArchive.open(wheel) as new:
        kept = [name for name in old.members if name.startswith("demo/") and name not in touched]
        assert len(kept) == len(SOURCES) + len(BUILT) - 6
        for name in kept:
            assert b"".join(old.raw(old.member(name))) == b"".join(new.raw(new.member(name)))
            assert old.member(name).time == new.member(name).time
            assert old.member(name).executable == new.member(name).executable
        assert new.member("demo/_C.abi3.so").executable


def test_a_changed_program_stays_one(tmp_path: Path) -> None:
    tool = {"demo/tool.sh": b"#!/bin/sh\n"}
    kit = Kit.make(tmp_path, sources={**SOURCES, **tool}, built={**BUILT, **tool})
    path = kit.build(tmp_path / "out", (change("demo/tool.sh", b"#!/bin/bash\n"), CHANGES[0])).path
    with WheelArchive.open(path) as archive:
        assert archive.read("demo/tool.sh") == b"#!/bin/bash\n"
        assert archive.member("demo/tool.sh").executable
        assert not archive.member("demo/core.py").executable


def test_the_stack_decides_about_the_executable_bit(tmp_path: Path) -> None:
    kit = Kit.make(tmp_path)
    same = SOURCES["demo/data/config.json"]
    changes = (
        replace(change("demo/run.sh", b"#!/bin/sh\n", added=True), executable=True),
        replace(change("demo/core.py", CHANGES[0].data), executable=True),
        replace(change("demo/data/config.json", same), executable=True),
    )
    path = kit.build(tmp_path / "out", changes).path
    with WheelArchive.open(path) as archive:
        assert all(archive.member(item.path).executable for item in changes)
        assert archive.read("demo/data/config.json") == same
        assert not archive.member("demo/old.py").executable
    unchanged = replace(changes[2], executable=False)  # as the official wheel has it
    with pytest.raises(BuildError) as caught:
        kit.build(tmp_path / "again", (unchanged, changes[1]))
    assert "as it is in the official wheel" in caught.value.details[0]


def test_a_stack_that_was_applied_to_foreign_files_is_refused(kit: Kit, tmp_path: Path) -> None:
    own, foreign = (Digest.of(data) for data in (SOURCES["demo/core.py"], b"FOREIGN = True\n"))
    kit.build(tmp_path, (replace(CHANGES[0], original=own), *CHANGES[1:]))
    with pytest.raises(IntegrityError) as caught:
        kit.build(tmp_path / "foreign", (replace(CHANGES[0], original=foreign), *CHANGES[1:]))
    assert caught.value.details == ("demo/core.py",)
    assert "cache" in (caught.value.hint or "")


def test_record_is_last_and_right(wheel: Path, members: dict[str, bytes]) -> None:
    own = f"{DIST_INFO}/RECORD"
    assert list(members)[-1] == own
    rows = members[own].decode().splitlines(keepends=True)
    assert rows == [record_row(name, data) for name, data in members.items() if name != own] + [f"{own},,\n"]
    with WheelFile.open(wheel) as reader:
        reader.validate_record()
    with ReferenceWheelFile(wheel) as reference:
        for name in reference.namelist():
            reference.read(name)


def test_every_statement_of_the_version_agrees(members: dict[str, bytes]) -> None:
    metadata = Metadata.from_email(members[f"{DIST_INFO}/METADATA"])
    assert str(metadata.version) == "1.0.0+bw.1"
    assert {name.split("/")[0] for name in members} == {"demo", DIST_INFO}
    values: dict[str, object] = {}
    exec(members["demo/_version.py"], values)  # noqa: S102 - it is what an import would run
    assert values["__version__"] == values["version"] == "1.0.0+bw.1"
    assert values["__version_tuple__"] == values["version_tuple"] == (1, 0, 0, "bw.1")
    assert values["commit_id"] == "g0123abc"


def test_metadata_keeps_what_it_had_and_says_it_is_not_official(members: dict[str, bytes]) -> None:
    data = members[f"{DIST_INFO}/METADATA"]
    new, old = email.message_from_bytes(data), email.message_from_string(METADATA)
    kept = [item for item in old.items() if item[0] != "Version"]
    assert [item for item in new.items() if item[0] != "Version"] == [*kept, ("License-File", "NOTICE")]
    body = data.decode().partition("\n\n")[2]
    assert body.startswith("**This is not an official release of demo.**")
    assert body.endswith(METADATA.partition("\n\n")[2])
    assert "- 0100-demo-change.patch: [Demo] Change it\n" in body
    for path in ("demo/core.py", "demo/new.py", "demo/old.py", "demo/data/config.json", "demo/_version.py"):
        assert f"    {path}\n" in body


def test_the_tag_is_that_of_the_file_name(members: dict[str, bytes]) -> None:
    text = members[f"{DIST_INFO}/WHEEL"].decode()
    assert [line for line in text.splitlines() if line.startswith("Tag:")] == [f"Tag: {TAG}"]
    assert "Root-Is-Purelib: false\n" in text
    assert "Generator: vllm-blackwell-stack" in text


def test_a_tag_of_several_parts_is_expanded(tmp_path: Path) -> None:
    kit = Kit.make(tmp_path, tag=f"cp38.cp39-abi3-manylinux2014_{ARCH}.manylinux_2_17_{ARCH}")
    text = read_wheel(kit.build(tmp_path / "out").path)[f"{DIST_INFO}/WHEEL"].decode()
    expected = [
        f"{python}-abi3-{platform}_{ARCH}"
        for python in ("cp38", "cp39")
        for platform in ("manylinux2014", "manylinux_2_17")
    ]
    assert [line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag:")] == expected


def test_licence_and_notice_are_there(members: dict[str, bytes]) -> None:
    assert members[f"{DIST_INFO}/licenses/LICENSE"] == INFO["licenses/LICENSE"]
    notice = members[f"{DIST_INFO}/licenses/NOTICE"].decode()
    assert notice.startswith("vLLM Blackwell stack\nNotice text.\n")
    assert "Files changed in this wheel:\n\n    demo/core.py\n" in notice
    assert "Files added to this wheel:\n\n    demo/new.py\n" in notice
    assert "Files removed from this wheel:\n\n    demo/old.py\n" in notice


def test_upstreams_own_notice_is_kept(tmp_path: Path) -> None:
    kit = Kit.make(tmp_path, info={**INFO, "licenses/NOTICE": b"Upstream's notice.\n"})
    notice = read_wheel(kit.build(tmp_path / "out").path)[f"{DIST_INFO}/licenses/NOTICE"]
    assert notice.startswith(b"Upstream's notice.\n\nvLLM Blackwell stack\n")


def test_the_data_folder_is_renamed_with_the_version(tmp_path: Path) -> None:
    built = {**BUILT, "demo-1.0.0.data/scripts/demo-run": b"#!python\nprint(1)\n"}
    path = Kit.make(tmp_path, built=built).build(tmp_path / "out").path
    assert read_wheel(path)["demo-1.0.0+bw.1.data/scripts/demo-run"] == b"#!python\nprint(1)\n"
    assert not [name for name in read_wheel(path) if name.startswith("demo-1.0.0.data")]
    with WheelFile.open(path) as reader:
        reader.validate_record()


def test_entry_points_are_untouched_and_origin_is_not_claimed(tmp_path: Path) -> None:
    kit = Kit.make(tmp_path, info={**INFO, "direct_url.json": b"{}", "RECORD.jws": b"{}"})
    members = read_wheel(kit.build(tmp_path / "out").path)
    assert members[f"{DIST_INFO}/entry_points.txt"] == INFO["entry_points.txt"]
    assert members[f"{DIST_INFO}/top_level.txt"] == INFO["top_level.txt"]
    assert not [name for name in members if name.endswith(("direct_url.json", "RECORD.jws"))]


def test_changed_python_files_carry_a_notice_and_no_other(members: dict[str, bytes]) -> None:
    for item in CHANGES:
        if item.data is None:
            continue
        data = members[item.path]
        if item.added or not item.path.endswith(".py"):
            assert data == item.data
            continue
        assert data.startswith(item.data)
        assert data.endswith(NOTICE_LINE)
        assert ast.dump(ast.parse(data)) == ast.dump(ast.parse(item.data))
    assert members["demo/no_newline.py"] == b"LAST = 2\n" + NOTICE_LINE
    marked = [name for name, data in members.items() if name.startswith("demo/") and b"Modified for" in data]
    assert sorted(marked) == ["demo/_version.py", "demo/core.py", "demo/crlf.py", "demo/no_newline.py"]


TEXTS = st.sampled_from(
    [
        "a = 1",
        "# c",
        "",
        "def f():\n    return 1",
        "if a:\n    pass\n    # x",
        "s = '''\n'''",
        "\f",
        "b = (1,\n 2)",
    ]
)


@given(lines=st.lists(TEXTS, max_size=5), newline=st.sampled_from(["\n", "\r\n"]), final=st.booleans())
def test_a_notice_never_changes_what_a_file_means(*, lines: list[str], newline: str, final: bool) -> None:
    text = newline.join(line.replace("\n", newline) for line in lines) + (newline if final else "")
    marked = with_change_notice("demo/x.py", text.encode(), ["0100-x.patch"], Version("1.0+bw.1"))
    assert marked.startswith(text.encode())
    assert ast.dump(ast.parse(marked), include_attributes=True) == ast.dump(
        ast.parse(text), include_attributes=True
    )


def test_the_version_module_is_rewritten_in_any_layout() -> None:
    sources = [
        VERSION_MODULE,
        "__version__ = '1.0.0'\nversion_tuple = (1,\n  0, 0)\nüx = 1\n",
        "ü = 'é'; __version__ = version = \"1.0.0\"  # é\nversion_tuple = __version_tuple__ = (1, 0, 0)\n",
    ]
    for source in sources:
        made = rewrite_version_module(source.encode(), Version("1.0.0+bw.2.s0a1b2c3d"))
        module = read_version_module(made)
        assert set(module.versions) == {"1.0.0+bw.2.s0a1b2c3d"}
        assert set(module.tuples) == {(1, 0, 0, "bw.2.s0a1b2c3d")}
        assert made.decode().count("é") == source.count("é")
    for bad in (b"x = 1\n", b"__version__ = '1'\n", b"version_tuple = (1,)\n", b"def f(:\n"):
        with pytest.raises(IntegrityError):
            rewrite_version_module(bad, Version("1.0.0+bw.1"))


def refused(kit: Kit, folder: Path, changes: tuple[FileChange, ...] = CHANGES) -> str:
    """Build what must not be built; nothing may be left behind."""
    with pytest.raises((BuildError, IntegrityError)) as caught:
        kit.build(folder / "out", changes)
    assert list((folder / "out").iterdir()) == []
    return f"{type(caught.value).__name__}: {caught.value.message} {' '.join(caught.value.details)}"


def test_archives_that_are_not_pinned_are_refused(kit: Kit, tmp_path: Path) -> None:
    plan = kit.plan()
    for name in ("official", "sdist"):
        path: Path = getattr(kit, name)
        bad = tmp_path / path.name
        bad.write_bytes(path.read_bytes()[:-1] + b"x")
        files = {"official": kit.official, "sdist": kit.sdist, name: bad}
        with pytest.raises(IntegrityError, match="expected sha256"):
            build_overlay(plan, files["official"], files["sdist"], tmp_path)
        with pytest.raises(IntegrityError, match="cannot read"):
            build_overlay(plan, **{**files, name: tmp_path / "none", "folder": tmp_path})
        bad.unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_is_not_in_the_wheel_as_it_is_is_refused(tmp_path: Path) -> None:
    kit = Kit.make(tmp_path, sources={**SOURCES, "demo/core.py": b"VALUE = 0\n"})
    assert "IntegrityError: 1 files of the sdist" in refused(kit, tmp_path)
    kit = Kit.make(tmp_path / "2", sources={**SOURCES, "demo/unknown.py": b""})
    assert "demo/unknown.py" in refused(kit, tmp_path / "2")


def test_sources_of_compiled_parts_need_not_be_in_the_wheel(tmp_path: Path) -> None:
    sources = {**SOURCES, "demo/csrc/kernel.cu": b"//"}
    assert Kit.make(tmp_path, sources=sources).build(tmp_path / "out").changed
    built = {**BUILT, "demo/csrc/kernel.cu": b"// other"}
    assert "demo/csrc/kernel.cu" in refused(
        Kit.make(tmp_path / "2", sources=sources, built=built), tmp_path / "2"
    )


def test_a_record_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    official = read_wheel(Kit.make(tmp_path).official)
    rows = official["demo-1.0.0.dist-info/RECORD"]
    lines = rows.splitlines(keepends=True)
    for number, bad in enumerate(
        [b"", b"".join(lines[1:]), rows + b"demo/ghost.py,sha256=AAA,1\n", rows + lines[0], b"\xff", b"a,b\n"]
    ):
        folder = tmp_path / str(number)
        assert "RECORD" in refused(Kit.make(folder, record=bad), folder)


@pytest.mark.parametrize(
    ("tag", "name", "data", "text"),
    [
        (TAG, "demo/_D.cpython-312-x86_64-linux-gnu.so", elf(), "for cp312 alone"),
        (
            f"cp312-cp312-manylinux_2_28_{ARCH}",
            "demo/_D.cpython-311-x86_64-linux-gnu.so",
            elf(),
            "for cp311 alone",
        ),
        (f"py3-none-manylinux_2_28_{ARCH}", "demo/_D.abi3.so", elf(), "stable ABI"),
        (TAG, "demo/_D.so", elf(symbol=b"PyInit__D"), "does not tell its ABI"),
        (TAG, "demo/_D.abi3.so", elf("riscv"), "built for i686"),
        (TAG, "demo/tool", elf("aarch64" if ARCH == "x86_64" else "x86_64"), "built for"),
        (TAG, "demo/_D.abi3.so", b"MZ\x90", "a Windows file"),
        (TAG, "demo/_D.abi3.so", b"# text", "not a native library"),
        (TAG, "demo/_D.abi3.so", elf()[:12], "cut off"),
        ("py3-none-any", "demo/libx.so.1", elf(), "in a wheel tagged py3-none-any"),
    ],
)
def test_a_native_file_that_its_tag_does_not_fit_is_refused(
    tmp_path: Path, tag: str, name: str, data: bytes, text: str
) -> None:
    built = {key: value for key, value in BUILT.items() if not key.endswith(".so")}
    info = {**INFO, "WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()}
    path = make_wheel(tmp_path / f"demo-1.0.0-{tag}.whl", {**SOURCES, **built, name: data}, info)
    with WheelArchive.open(path) as archive:
        findings = (
            Verifier(WheelContents(archive), Kit.make(tmp_path / "pin").pin, filename=path.name)
            .run()
            .findings
        )
    assert [(item.code, item.subject) for item in findings] == [
        ("native-tag", name),
        ("unpatched", path.name),
    ]
    assert text in findings[0].message
    if tag.endswith(ARCH):  # a pin takes no other wheel
        odd = Kit.make(tmp_path / "odd", built={**built, name: data}, tag=tag)
        message = refused(odd, tmp_path / "odd")
        assert f"{name}: " in message
        assert text in message


def test_native_files_that_fit_are_accepted(tmp_path: Path) -> None:
    built = {**BUILT, "demo/lib/libplain.so": elf(), "demo/lib/libplain.so.2": elf(), "demo/tool": elf()}
    assert Kit.make(tmp_path, built=built).build(tmp_path / "out").changed
    tag = f"cp312-cp312-manylinux_2_28_{ARCH}"
    built = {**built, f"demo/_D.cpython-312-{ARCH}-linux-gnu.so": elf()}
    assert Kit.make(tmp_path / "2", built=built, tag=tag).build(tmp_path / "2" / "out").changed


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (change("demo/vendored.py", b"X = 1\n"), "that the build made"),
        (change("demo/vendored.py", b"X = 1\n", added=True), "that the build made"),
        (change("demo/core.py", b"X = 1\n", added=True), "added, but in the official wheel"),
        (change("demo/ghost.py", b"X = 1\n"), "changed, but not in the official wheel"),
        (change("demo/ghost.py", None), "changed, but not in the official wheel"),
        (change("demo/core.py", SOURCES["demo/core.py"]), "as it is in the official wheel"),
        (change("other/core.py", b"", added=True), "not below the package"),
        (change("demo/core.py", b"def f(:\n"), "does not parse"),
        (change("demo/core.py", b"\xff\n"), "does not parse"),
    ],
)
def test_a_change_that_does_not_fit_is_refused_by_name(
    kit: Kit, tmp_path: Path, bad: FileChange, text: str
) -> None:
    message = refused(kit, tmp_path, (bad,))
    assert message.startswith("BuildError")
    assert bad.path in message
    assert "0100-demo-change.patch" in message
    assert text in message


def test_no_change_and_a_double_change_are_refused(kit: Kit, tmp_path: Path) -> None:
    assert refused(kit, tmp_path, ()).startswith("BuildError")
    assert "more than once" in refused(kit, tmp_path / "2", (CHANGES[0], CHANGES[0]))


NATIVE = [
    "csrc/x.py",
    "setup.py",
    "demo/_custom_ops.py",
    "demo/csrc/y.txt",
    "demo/kernel.cu",
    "demo/_version.py",
]


@pytest.mark.parametrize("path", NATIVE)
def test_changes_of_compiled_parts_are_refused_with_patch_and_file(kit: Kit, path: str) -> None:
    paths = [("demo/core.py", ("0100-a.patch",)), (path, ("0200-b.patch", "0300-c.patch"))]
    with pytest.raises(BuildError) as caught:
        select_package_changes(paths, kit.pin.layout)
    assert caught.value.details == (f"{path} (0200-b.patch, 0300-c.patch)",)


def test_changes_outside_of_the_package_are_left_out(kit: Kit) -> None:
    paths = [("demo/core.py", ("a",)), ("tests/test_demo.py", ("a",)), ("docs/x.md", ("b",))]
    assert select_package_changes(paths, kit.pin.layout) == (
        ("demo/core.py",),
        ("tests/test_demo.py", "docs/x.md"),
    )
    for nothing in (paths[1:], []):
        with pytest.raises(BuildError, match="the wheel would be the official one"):
            select_package_changes(nothing, kit.pin.layout)


_BUILD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from wheelkit import Kit, SOURCES, BUILT, INFO, TAG
kit = Kit(Path(sys.argv[3]), {**SOURCES, **BUILT}, SOURCES, INFO)
print(kit.build(Path(sys.argv[4])).sha256)
"""
ENVIRONMENTS: list[tuple[dict[str, str], int]] = [
    ({"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C"}, 0o022),
    ({"PYTHONHASHSEED": "1", "TZ": "Pacific/Kiritimati", "LC_ALL": "tr_TR.UTF-8"}, 0o077),
    (
        {"PYTHONHASHSEED": "4242", "TZ": "America/St_Johns", "PYTHONUTF8": "0", "SOURCE_DATE_EPOCH": "1"},
        0o000,
    ),
    (
        {"PYTHONHASHSEED": "random", "COLUMNS": "20", "PYTHONOPTIMIZE": "2", "PYTHONIOENCODING": "ascii"},
        0o027,
    ),
]


def test_the_same_input_gives_the_same_bytes_everywhere(kit: Kit, wheel: Path, tmp_path: Path) -> None:
    expected = wheel.read_bytes()
    for number, (environment, mask) in enumerate(ENVIRONMENTS):
        folder = tmp_path / str(number)
        words = [sys.executable, "-c", _BUILD, str(TOOLS), str(TOOLS / "tests"), str(kit.folder), str(folder)]
        env = {"PATH": os.environ["PATH"], **environment}
        subprocess.run(words, check=True, capture_output=True, env=env, umask=mask, cwd="/")
        assert (folder / wheel.name).read_bytes() == expected
        assert (folder / wheel.name).stat().st_mode & 0o777 == 0o644


def test_building_over_an_earlier_wheel_replaces_it(kit: Kit, tmp_path: Path) -> None:
    first = kit.build(tmp_path)
    first.path.write_bytes(b"broken")
    assert kit.build(tmp_path).sha256 == first.sha256
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"\Ademo/[a-z]{1,6}\.(py|txt)\Z"),
        st.none() | st.integers().map(lambda n: f"x = {n}\n".encode()),
        min_size=1,
    )
)
def test_any_changes_give_a_wheel_that_verifies(
    kit: Kit, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, bytes | None]
) -> None:
    existing = kit.package
    taken = tuple(
        change(path, data, added=path not in existing)
        for path, data in changes.items()
        if (path in existing) >= (data is None) and path not in BUILT
    )
    if not any(item.data is not None or item.path in existing for item in taken):
        return
    taken = tuple(item for item in taken if item.data is not None or not item.added)
    path = kit.build(tmp_path_factory.mktemp("any"), taken).path
    with WheelFile.open(path) as reader:
        reader.validate_record()
    with zipfile.ZipFile(path) as archive:
        rows = parse_record(archive.read(f"{DIST_INFO}/RECORD"), source="x")
        assert rows.keys() == set(archive.namelist())


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip in it; installs go into folders of their own."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    return folder


def test_pip_and_uv_install_it_and_it_runs(kit: Kit, wheel: Path, environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    quiet = {
        "PATH": os.environ["PATH"],
        "PIP_CONFIG_FILE": os.devnull,
        "UV_NO_CONFIG": "1",
        "PIP_NO_INDEX": "1",
    }
    quiet |= {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--quiet"]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--python", python]
    for command in (pip, uv):
        for file in (kit.official, wheel):  # the patched one takes the place of the official one
            subprocess.run([*command, str(file)], check=True, capture_output=True, env=quiet)
        code = (
            "import demo.new, demo.core, importlib.metadata as m\n"
            "print(demo.__version__, demo.core.VALUE, m.version('demo'))"
        )
        done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd="/")
        assert done.stdout.split() == ["1.0.0+bw.1", "2", "1.0.0+bw.1"]
        done = subprocess.run(
            [python, "-c", "import demo.old"], check=False, capture_output=True, text=True, cwd="/"
        )
        assert "ModuleNotFoundError" in done.stderr
        script = subprocess.run(
            [environment / "bin" / "demo-version"], check=False, capture_output=True, text=True
        )
        assert "1.0.0+BW.1" in script.stderr + script.stdout
        subprocess.run([python, "-m", "pip", "uninstall", "--yes", "--quiet", "demo"], check=True, env=quiet)


def test_the_sbom_lies_where_pep_770_says(members: dict[str, bytes]) -> None:
    (name,) = [name for name in members if "/sboms/" in name]
    assert name == f"{DIST_INFO}/sboms/vllm-stack.cdx.json"
    assert json.loads(members[name])["bomFormat"] == "CycloneDX"
