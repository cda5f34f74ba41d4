"""Pins, classes of paths, the workspace, and files that appear whole."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from stackproject import Project, make_sdist

from vllm_stack.atomic import atomic_file, write_atomic
from vllm_stack.base import Base
from vllm_stack.classify import PathClass, classify
from vllm_stack.errors import IntegrityError, UsageError
from vllm_stack.hashing import sha256_file
from vllm_stack.pins import load_pin, parse_pin
from vllm_stack.sdist import read_sdist
from vllm_stack.workspace import PROJECT_ROOT, Workspace, default_cache_directory

PIN = Project.pin_text("a" * 64, 5)


def test_the_real_pins_are_valid_and_complete() -> None:
    pins = {
        name: load_pin(PROJECT_ROOT / "upstream" / f"{name}.toml") for name in ("vllm", "vllm-gguf-plugin")
    }
    assert (pins["vllm"].release, pins["vllm-gguf-plugin"].release) == ("0.33.0", "0.0.5")
    for pin in pins.values():
        assert pin.sdist.filename.endswith(f"-{pin.release}.tar.gz")
        assert {wheel.arch for wheel in pin.wheels} == {"x86_64", "aarch64"}


@pytest.mark.parametrize(
    "path",
    [
        "rust-toolchain.toml",
        "rust/src/cmd/Cargo.toml",
        "tools/build_rust.py",
        "tools/build_rust.sh",
        "tools/build_deepgemm_C.py",
        "tools/setup_deepgemm_pythons.sh",
        "tools/use_existing_torch.py",
        "cmake/utils.cmake",
        "setup.py",
    ],
)
def test_what_builds_vllm_is_native(path: str) -> None:
    layout = load_pin(PROJECT_ROOT / "upstream" / "vllm.toml").layout
    assert classify(path, layout) is PathClass.NATIVE
    assert classify("tools/pre_commit/check.py", layout) is PathClass.OUTSIDE


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 9", "schema"),
        ('tag = "v1.0.0"', 'tag = "v1.0.0"\ntags = 1', "tags: Extra inputs"),
        ('arch = "x86_64"', 'arch = "x86_64"\nos = "linux"', "wheels.0.os"),
        ('package = "demo"', 'package = "demo"\nnativ = []', "layout.nativ"),
        ('sha256 = "aaaa', 'sha256 = "AAAA', "sdist.sha256"),
        ("size = 5", "size = 0", "sdist.size"),
        ('release = "1.0.0"', 'release = "1.0.0+local"', "release"),
        ('release = "1.0.0"', 'release = "one"', "release"),
        ('release = "1.0.0"', 'release = "1.0.1"', "is not demo 1.0.1"),
        ('arch = "x86_64"', 'arch = "aarch64"', "is not a wheel for aarch64"),
        ("demo-1.0.0.tar.gz", "../demo-1.0.0.tar.gz", "bare file name"),
        ("demo-1.0.0.tar.gz", "demo-1.0.0.zip", "tar.gz"),
        ('package = "demo"', 'package = "de mo"', "Python package"),
        ("[sdist]", "[sdist", "not valid TOML"),
    ],
)
def test_pins_that_are_not_valid(old: str, new: str, said: str) -> None:
    assert old in PIN
    with pytest.raises(UsageError) as caught:
        parse_pin(PIN.replace(old, new, 1), source="demo.toml")
    assert said in " ".join([caught.value.message, *caught.value.details])
    assert "demo.toml" in caught.value.message


def test_an_architecture_without_a_wheel() -> None:
    with pytest.raises(UsageError, match="no wheel for aarch64"):
        parse_pin(PIN, source="demo.toml").wheel("aarch64")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("demo/core.py", PathClass.PACKAGE),
        ("demo/data/config.json", PathClass.PACKAGE),
        ("demo/_custom_ops.py", PathClass.NATIVE),
        ("demo/kernel.cuh", PathClass.NATIVE),
        ("csrc/deep/x.py", PathClass.NATIVE),
        ("csrcs/x.py", PathClass.OUTSIDE),
        ("setup.py", PathClass.NATIVE),
        ("demos/setup.py", PathClass.OUTSIDE),
        ("demo.py", PathClass.OUTSIDE),
        ("tests/demo/core.py", PathClass.OUTSIDE),
    ],
)
def test_classes_of_paths(path: str, kind: PathClass) -> None:
    assert classify(path, parse_pin(PIN, source="x").layout) is kind


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a/.git/config", "a//x"])
def test_a_source_archive_with_an_unsafe_name(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "bad.tar.gz"
    make_sdist(archive, {name: "x"})
    with pytest.raises(IntegrityError, match="unsafe name"):
        list(read_sdist(archive, parse_pin(PIN, source="x").layout))


def test_a_truncated_source_archive(tmp_path: Path) -> None:
    archive = tmp_path / "cut.tar.gz"
    make_sdist(archive, {"demo/x.py": "x" * 10000, "demo/y.py": str(list(range(5000)))})
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(IntegrityError, match="not a readable source archive"):
        list(read_sdist(archive, parse_pin(PIN, source="x").layout))


def test_an_archive_with_another_hash_is_not_imported(project: Project) -> None:
    pin = load_pin(project.workspace.pin_file("demo"))
    other = pin.model_copy(update={"sdist": pin.sdist.model_copy(update={"sha256": "b" * 64})})
    with pytest.raises(IntegrityError) as caught:
        Base.ensure(project.workspace, other, project.sdist)
    assert "b" * 64 in caught.value.message
    assert sha256_file(project.sdist) in caught.value.message
    assert [path.name for path in project.workspace.bases.iterdir() if path.name.startswith(".")] == []


def test_two_imports_at_once_give_one_base(project: Project) -> None:
    workspace = Workspace(project.root, project.root / "another cache")
    pin = load_pin(workspace.pin_file("demo"))
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(Base.ensure(workspace, pin, project.sdist).commit))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [project.base.commit] * 4
    assert len(list(workspace.bases.iterdir())) == 1


def test_a_base_without_the_note_of_its_commit_is_damaged(project: Project) -> None:
    pin = load_pin(project.workspace.pin_file("demo"))
    assert Base.find(project.workspace, pin) == project.base
    (note,) = project.workspace.bases.glob("*/vllm-stack-base")
    for text in (b"0" * 40, b"", b"\xff"):
        note.write_bytes(text)
        with pytest.raises(IntegrityError) as caught:
            Base.find(project.workspace, pin)
        assert caught.value.hint == f"remove {note.parent} and run the command again"
    note.unlink()
    with pytest.raises(IntegrityError, match="is damaged"):
        Base.find(project.workspace, pin)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("VLLM_STACK_CACHE", raising=False)
    assert default_cache_directory() == Path.home() / ".cache" / "vllm-stack"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "vllm-stack"
    monkeypatch.setenv("VLLM_STACK_CACHE", str(tmp_path / "mine"))
    assert default_cache_directory() == tmp_path / "mine"


def test_a_folder_that_is_no_stack_repository(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no upstream/ folder"):
        Workspace.locate(tmp_path)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail_midway() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_midway()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
