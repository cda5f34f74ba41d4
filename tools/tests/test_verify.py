"""Verifying wheels and installations."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from wheelkit import ARCH, CHANGES, SOURCES, STACK_ID, TAG, Kit, make_patch, make_wheel, read_wheel, rezip

import vllm_stack.verify as verify_module
from vllm_stack.errors import IntegrityError, UsageError
from vllm_stack.findings import CODES, Finding
from vllm_stack.installed import InstalledContents, default_python, find_installations
from vllm_stack.record import Digest
from vllm_stack.verify import Expected, Verification, Verifier, WheelContents
from vllm_stack.wheelzip import WheelArchive

OLD_ID = "0f" * 32
INFO = "demo-1.0.0+bw.1.dist-info"


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit.make(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="session")
def built(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.build(tmp_path_factory.mktemp("built")).path


@pytest.fixture
def wheel(built: Path, tmp_path: Path) -> Path:
    """A patched wheel that a test may damage."""
    return Path(shutil.copy(built, tmp_path))


@pytest.fixture(scope="session")
def stack(kit: Kit) -> Expected:
    """The stack that the wheels here are made of."""
    patch = make_patch()
    return Expected(
        pin=kit.pin,
        version=Version("1.0.0+bw.1"),
        stack_id=STACK_ID,
        patches=((patch.name, patch.sha256),),
        released={OLD_ID: 1, STACK_ID: 2},
        changes=CHANGES,
    )


def verify(path: Path, stack: Expected, *, without_stack: bool = False) -> Verification:
    """Verify a wheel; an archive that cannot be opened is one finding."""
    try:
        with WheelArchive.open(path) as archive:
            expected = None if without_stack else stack
            return Verifier(WheelContents(archive), stack.pin, filename=path.name, expected=expected).run()
    except IntegrityError as error:
        finding = Finding("damaged", path.name, error.message)
        return Verification(path.name, "", "", patched=False, stack_id=None, findings=(finding,))


def codes(found: Verification) -> list[tuple[str, str]]:
    return [(item.code, item.subject) for item in found.findings]


def test_a_patched_wheel_stands(built: Path, stack: Expected) -> None:
    found = verify(built, stack)
    assert found.findings == ()
    assert found.patched
    assert (found.version, found.stack_id) == ("1.0.0+bw.1", STACK_ID)
    assert verify(built, stack, without_stack=True).findings == ()


def test_the_official_wheel_is_unpatched_and_its_tag_differs(kit: Kit, stack: Expected) -> None:
    found = verify(kit.official, stack)
    assert not found.patched
    tags = ("tags", "demo-1.0.0.dist-info/WHEEL")  # as upstream ships it
    assert codes(found) == [tags, ("unpatched", kit.official.name)]


def test_a_wheel_renamed_without_its_metadata_is_found(kit: Kit, wheel: Path, stack: Expected) -> None:
    renamed = wheel.rename(wheel.with_name(wheel.name.replace("bw.1", "bw.2")))
    assert ("version-file-name", renamed.name) in codes(verify(renamed, stack))
    disguised = Path(shutil.copy(kit.official, wheel.with_name(f"demo-1.0.0+bw.1-{TAG}.whl")))
    found = dict(codes(verify(disguised, stack)))
    assert {"version-file-name", "unpatched"} <= found.keys()


def test_a_wheel_with_another_tag_or_name_is_found(wheel: Path, stack: Expected) -> None:
    other = "aarch64" if ARCH == "x86_64" else "x86_64"
    for name, code in (
        (wheel.name.replace(ARCH, other), "tags"),
        (wheel.name.replace("demo", "memo"), "file-name"),
    ):
        renamed = Path(shutil.copy(wheel, wheel.with_name(name)))
        assert codes(verify(renamed, stack))[0][0] == code
    assert codes(verify(wheel.rename(wheel.with_name("demo.whl")), stack)) == [("file-name", "demo.whl")]


def test_a_dist_info_folder_of_another_version_is_found(wheel: Path, stack: Expected) -> None:
    members = {name: data for name, data in read_wheel(wheel).items() if INFO not in name}
    info = {name.removeprefix(f"{INFO}/"): data for name, data in read_wheel(wheel).items() if INFO in name}
    del info["RECORD"]
    make_wheel(wheel, members, info, dist_info="demo-1.0.0+bw.2.dist-info")
    assert codes(verify(wheel, stack)) == [("version-dist-info", wheel.name)]


CORE, NEW, VERSION = "demo/core.py", "demo/new.py", "demo/_version.py"
SBOM = f"{INFO}/sboms/vllm-stack.cdx.json"
#: What is done to the wheel, whether RECORD is made to fit, what must be found.
TAMPERINGS: list[tuple[dict[str, bytes | None], bool, set[tuple[str, str]]]] = [
    ({CORE: b"EVIL = 1\n"}, False, {("record-mismatch", CORE), ("sbom-file", CORE), ("stack-member", CORE)}),
    ({CORE: b"EVIL = 1\n"}, True, {("sbom-file", CORE), ("stack-member", CORE)}),
    ({"demo/vendored.py": b"EVIL = 1\n"}, False, {("record-mismatch", "demo/vendored.py")}),
    ({"demo/vendored.py": b"VENDORED = 2\n"}, False, {("record-mismatch", "demo/vendored.py")}),  # as long
    ({"demo/extra.py": b""}, False, {("record-unlisted", "demo/extra.py")}),
    ({"evil.pth": b"import os\n"}, False, {("record-unlisted", "evil.pth")}),
    ({NEW: None}, False, {("record-missing", NEW), ("sbom-file", NEW), ("stack-member", NEW)}),
    ({NEW: None}, True, {("sbom-file", NEW), ("stack-member", NEW)}),
    (
        {"demo/old.py": b"OLD = True\n"},
        True,
        {("sbom-removed", "demo/old.py"), ("stack-member", "demo/old.py")},
    ),
    ({SBOM: None}, True, {("sbom-missing", "")}),
    ({SBOM: b"{}"}, True, {("damaged", "")}),
    (
        {VERSION: b"__version__ = '1.0.0'\nversion_tuple = (1, 0, 0)\n"},
        True,
        {("version-module", VERSION), ("sbom-file", VERSION)},
    ),
    ({VERSION: b"__version__ = f()\n"}, True, {("damaged", ""), ("sbom-file", VERSION)}),
    ({VERSION: None}, True, {("version-module", VERSION), ("sbom-file", VERSION)}),
    (
        {f"{INFO}/METADATA": b"Name: demo\nVersion: 1.0.0\n\n"},
        True,
        {
            ("version-dist-info", ""),
            ("version-module", VERSION),
            ("version-file-name", ""),
            ("unpatched", ""),
            ("sbom-version", SBOM),
            ("stack-version", ""),
            ("stack-member", CORE),
            ("stack-member", "demo/no_newline.py"),
            ("stack-member", "demo/crlf.py"),
        },
    ),
    ({f"{INFO}/METADATA": b"Name: memo\nVersion: 1.0.0+bw.1\n\n"}, True, {("name", f"{INFO}/METADATA")}),
    (
        {f"{INFO}/METADATA": None},
        True,
        {("damaged", ""), ("version-file-name", ""), ("unpatched", ""), ("sbom-version", SBOM)},
    ),
    ({"demo-1.0.0.data/scripts/x": b""}, True, {("version-dist-info", "")}),
    (
        {f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n"},
        True,
        {("tags", f"{INFO}/WHEEL")},
    ),
    ({f"{INFO}/licenses/NOTICE": None}, True, {("license-missing", f"{INFO}/licenses/NOTICE")}),
    ({f"{INFO}/direct_url.json": b"{}"}, True, {("direct-url", f"{INFO}/direct_url.json")}),
    ({f"{INFO}/RECORD": b"demo/core.py,,\n"}, False, set()),
]


@pytest.mark.parametrize(("change", "fix_record", "expected"), TAMPERINGS)
def test_each_tampering_has_its_finding(
    *,
    wheel: Path,
    stack: Expected,
    change: dict[str, bytes | None],
    fix_record: bool,
    expected: set[tuple[str, str]],
) -> None:
    rezip(wheel, change, fix_record=fix_record)
    found = set(codes(verify(wheel, stack)))
    assert {(code, subject or wheel.name) for code, subject in expected} <= found
    if expected:
        native = {
            item for item in found if item[0] == "native-tag"
        }  # a tag that is wrong fits no native file
        assert found - native == {(code, subject or wheel.name) for code, subject in expected}
    else:
        assert ("record-no-hash", CORE) in found
        assert ("record-unlisted", NEW) in found


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    folder = Path(verify_module.__file__).parent
    sources = [(folder / name).read_text() for name in ("verify.py", "verifying.py")]
    used = {code for text in sources for code in re.findall(r'(?:_find|Finding)\(\s*"([a-z-]+)"', text)}
    assert used == set(CODES)


def test_one_fault_is_one_message(wheel: Path, stack: Expected) -> None:
    rezip(wheel, {"demo/extra.py": b"", "demo/more.py": b""})
    messages = [f"{item.code} {item.subject} {item.message}" for item in verify(wheel, stack).findings]
    assert len(messages) == len(set(messages)) == 2


def test_another_stack_is_named(built: Path, stack: Expected) -> None:
    (finding,) = verify(built, replace(stack, stack_id=OLD_ID)).findings
    assert finding.code == "stack-id"
    assert finding.message == f"made of release 2, the stack here is {OLD_ID[:12]}"
    (finding,) = verify(built, replace(stack, stack_id=OLD_ID, released={})).findings
    assert f"made of stack {STACK_ID[:12]}" in finding.message


def test_a_stack_that_gives_other_bytes_is_found(built: Path, stack: Expected) -> None:
    other = (replace(CHANGES[0], data=b"X = 1\n"), *CHANGES[1:])
    assert codes(verify(built, replace(stack, changes=other))) == [("stack-member", CORE)]
    assert codes(verify(built, replace(stack, changes=CHANGES[1:]))) == [("stack-member", CORE)]
    assert codes(verify(built, replace(stack, patches=(("x", "0" * 64),)))) == [("stack-patches", SBOM)]
    assert codes(verify(built, replace(stack, version=Version("1.0.0+bw.10")))) == [
        ("stack-version", built.name)
    ]
    assert verify(built, replace(stack, changes=None)).findings == ()


def test_what_the_stack_leaves_alone_is_as_in_the_sources(wheel: Path, stack: Expected) -> None:
    touched = {item.path for item in CHANGES}
    sources = {path: Digest.of(data) for path, data in SOURCES.items() if path not in touched}
    full = replace(stack, sources={**sources, "demo/csrc/kernel.h": Digest.of(b"")})
    assert verify(wheel, full).findings == ()  # sources of compiled parts need not be there
    gone, evil = "demo/_custom_ops.py", "demo/__init__.py"
    plain = "demo/sub/\xfcn\xefcode.py"
    rezip(wheel, {gone: None, evil: b"EVIL = 1\n", plain: None}, fix_record=True)
    assert verify(wheel, stack).findings == ()
    assert codes(verify(wheel, full)) == [("source-file", evil), ("source-file", plain)]
    other = replace(full, stack_id=OLD_ID)  # which files another stack changes is not known
    assert codes(verify(wheel, other)) == [("stack-id", wheel.name)]


def test_a_damaged_file_does_not_hide_the_next(wheel: Path, stack: Expected) -> None:
    sources = {path: Digest.of(SOURCES[path]) for path in ("demo/__init__.py", "demo/_custom_ops.py")}
    rezip(wheel, {"demo/_custom_ops.py": b"EVIL = 1\n"}, fix_record=True)
    with WheelArchive.open(wheel) as archive:
        member = archive.member("demo/__init__.py")
    raw = bytearray(wheel.read_bytes())
    raw[member.data_offset + member.compressed_size - 1] ^= 0xFF
    wheel.write_bytes(raw)
    found = codes(verify(wheel, replace(stack, sources=sources)))
    assert found == [("damaged", "demo/__init__.py"), ("source-file", "demo/_custom_ops.py")]


def test_a_pin_of_another_wheel_is_found(built: Path, stack: Expected) -> None:
    wheels = tuple(item.model_copy(update={"sha256": "0" * 64}) for item in stack.pin.wheels)
    other = replace(stack, pin=stack.pin.model_copy(update={"wheels": wheels}))
    assert codes(verify(built, other)) == [("stack-official", built.name)]


def test_a_users_label_is_accepted(kit: Kit, stack: Expected, tmp_path: Path) -> None:
    path = kit.build(tmp_path, version="1.0.0+bw.1.acme.2").path
    assert verify(path, stack).findings == ()
    other = kit.build(tmp_path, version="1.0.0+bw.10").path  # no label behind bw.1, but another number
    assert codes(verify(other, stack)) == [("stack-version", other.name)]


def test_a_wheel_cut_off_is_found(built: Path, stack: Expected, tmp_path: Path) -> None:
    data = built.read_bytes()
    path = tmp_path / built.name
    for size in range(0, len(data), 997):
        path.write_bytes(data[:size])
        assert codes(verify(path, stack)) == [("damaged", path.name)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_changed_byte_is_found_or_changes_no_file(
    built: Path, stack: Expected, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(built.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / built.name
    path.write_bytes(raw)
    # Permissions are no content, and a compressed stream has bits that nothing depends on; the report beside
    # a wheel covers these too (test_build.py).
    assert verify(path, stack).findings or read_wheel(path) == read_wheel(built)


class Venv:
    """An environment into which tests install wheels."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
        self.site = next(folder.glob("lib/python*/site-packages"))

    def install(self, wheel: Path, *, uv: bool = False) -> None:
        """Install a wheel in place of whatever is there."""
        environment = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
        environment["UV_CACHE_DIR"] = str(self.python.parents[1] / "uv-cache")
        pip: list[str | Path] = [self.python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        for left in self.site.glob("demo*"):
            shutil.rmtree(left)
        command = [*pip, "install", "--no-deps", "--no-index", wheel]
        if uv:
            uv_pip: list[str | Path] = [sys.executable, "-m", "uv", "pip", "install", "--offline"]
            command = [*uv_pip, "--no-deps", "--python", self.python, wheel]
        subprocess.run(command, check=True, capture_output=True, env=environment)

    def verify(self, stack: Expected) -> Verification:
        """Verify what is installed."""
        place = find_installations(str(self.python), "demo", "demo")
        contents = InstalledContents(place.dist_infos[0], place.roots[0], "demo")
        return Verifier(contents, stack.pin, expected=stack).run()


@pytest.fixture(scope="session")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Venv:
    return Venv(tmp_path_factory.mktemp("venv") / "it's a venv")


@pytest.mark.parametrize("uv", [False, True])
def test_an_installation_of_the_patched_wheel_stands(
    *, venv: Venv, built: Path, stack: Expected, uv: bool
) -> None:
    venv.install(built, uv=uv)
    assert venv.verify(stack).findings == ()
    subprocess.run([venv.python, "-c", "import demo.core, demo.new"], check=True, cwd="/", env={})
    assert list(venv.site.glob("demo/__pycache__/*.pyc"))
    (venv.site / "demo/__pycache__/kernel.nbi").write_bytes(
        b""
    )  # other compilers keep their caches there too
    found = venv.verify(stack)
    assert found.findings == ()
    assert found.patched


def test_patched_files_copied_over_the_official_ones_are_found(
    venv: Venv, kit: Kit, built: Path, stack: Expected
) -> None:
    venv.install(kit.official)
    assert codes(venv.verify(stack)) == [("unpatched", str(venv.site / "demo-1.0.0.dist-info"))]
    for name, data in read_wheel(built).items():
        if name in {CORE, NEW}:
            (venv.site / name).write_bytes(data)
    found = codes(venv.verify(stack))
    assert found == [
        ("record-unlisted", NEW),
        ("record-mismatch", CORE),
        ("unpatched", str(venv.site / "demo-1.0.0.dist-info")),
    ]


def test_a_damaged_installation_is_found(venv: Venv, built: Path, stack: Expected) -> None:
    venv.install(built)
    (venv.site / "demo/crlf.py").write_bytes(b"A = 1\n")
    (venv.site / "demo/vendored.py").unlink()
    (venv.site / "demo/sub/extra.py").write_bytes(b"")
    (venv.python.parent / "demo-version").write_text("#!/bin/sh\n")
    found = set(codes(venv.verify(stack)))
    assert found == {
        ("record-unlisted", "demo/sub/extra.py"),
        ("record-mismatch", "../../../bin/demo-version"),
        ("record-mismatch", "demo/crlf.py"),
        ("record-missing", "demo/vendored.py"),
        ("sbom-file", "demo/crlf.py"),
        ("stack-member", "demo/crlf.py"),
    }


def test_an_installation_without_record_is_found(venv: Venv, built: Path, stack: Expected) -> None:
    venv.install(built)
    (venv.site / INFO / "RECORD").unlink()
    assert codes(venv.verify(stack)) == [("record-absent", f"{INFO}/RECORD")]


def test_every_installation_on_the_search_path_is_reported(venv: Venv, kit: Kit, built: Path) -> None:
    venv.install(built)
    with zipfile.ZipFile(kit.official) as archive:
        archive.extractall(venv.site)
    place = find_installations(str(venv.python), "demo", "demo")
    assert {item.name for item in place.dist_infos} == {INFO, "demo-1.0.0.dist-info"}
    assert place.imported == (venv.site / "demo",)
    assert find_installations(str(venv.python), "absent", "absent").dist_infos == ()


def test_an_interpreter_may_be_named_from_the_current_folder(
    venv: Venv, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.install(built)
    monkeypatch.chdir(venv.python.parents[1])
    place = find_installations("bin/python", "demo", "demo")
    assert place.dist_infos == (venv.site / INFO,)
    assert place.python == str(venv.python)


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    for program in ("/bin/false", "/bin/true", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(UsageError):
            find_installations(program, "demo", "demo")


def test_the_default_is_the_users_python_and_not_ours(
    tmp_path: Path, venv: Venv, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(sys.prefix) / "bin"
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(own), str(tmp_path), str(venv.python.parent)]))
    assert Path(default_python()).parent == venv.python.parent
    monkeypatch.setenv("PATH", os.pathsep.join([str(own), str(tmp_path)]))
    with pytest.raises(UsageError, match="no Python on the PATH"):
        default_python()
