"""build-wheel and verify as commands, on real stacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stackproject import FILES, Completed, Project, message
from wheelkit import ARCH, INFO, TAG, VERSION_MODULE, elf, make_wheel, read_wheel, rezip

import vllm_stack
from vllm_stack.base import BASE_REF
from vllm_stack.hashing import sha256_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

OFFICIAL = f"demo-1.0.0-{TAG}.whl"


@pytest.fixture
def wheels(project: Project) -> Project:
    """A stack repository whose pin names an official wheel that is in the download cache."""
    package = {name: text.encode() for name, text in FILES.items() if name.startswith("demo/")}
    package |= {"demo/_version.py": VERSION_MODULE.encode(), "demo/_C.abi3.so": elf()}
    official = make_wheel(project.root / OFFICIAL, package, INFO)
    pin = project.workspace.pin_file("demo")
    text = pin.read_text()
    head, _, tail = text.partition("[[wheels]]")
    layout = tail[tail.index("[layout]") :]
    data = official.read_bytes()
    entry = f'arch = "{ARCH}"\nfilename = "{OFFICIAL}"\nsha256 = "{sha256_bytes(data)}"\nsize = {len(data)}\n'
    pin.write_text(f"{head}[[wheels]]\n{entry}{layout}")
    for path in (official, project.sdist):
        put_in_cache(project, path)
    (project.root / "NOTICE").write_text("Our notice.\n")
    return project


def put_in_cache(project: Project, path: Path) -> None:
    folder = project.workspace.downloads / sha256_bytes(path.read_bytes())
    folder.mkdir(parents=True)
    shutil.copy(path, folder)


@pytest.fixture
def patched(wheels: Project) -> Project:
    """The same with a stack of three patches."""
    wheels.add_patches()
    return wheels


def dist(project: Project) -> Path:
    return project.root / "dist"


def build(project: Project, *words: str) -> Completed:
    return project.run("build-wheel", "--offline", "--output", str(dist(project)), *words)


def built(project: Project, *words: str) -> Path:
    done = build(project, *words)
    assert done.code == 0, done.err
    return dist(project) / str(done.report["wheels"][0]["output"]["filename"])


def left(project: Project) -> list[str]:
    return sorted(path.name for path in dist(project).glob("*")) if dist(project).exists() else []


def test_the_wheel_holds_the_stack_and_its_report_says_so(patched: Project) -> None:
    done = build(patched)
    assert done.code == 0, done.err
    stack = patched.stack
    version = f"1.0.0+bw.0.s{stack.stack_id[:8]}"
    (report,) = done.report["wheels"]
    wheel = dist(patched) / f"demo-{version}-{TAG}.whl"
    assert left(patched) == [wheel.name, f"{wheel.name}.json"]
    assert report["version"] == version
    assert report["release"] is None
    assert report["stack_id"] == stack.stack_id
    assert report["changed"] == ["demo/core.py"]
    assert report["added"] == ["demo/new.py"]
    assert report["left_out"] == [{"path": "tests/test_core.py", "patches": [stack.patches[1].name]}]
    assert [item["name"] for item in report["patches"]] == [patch.name for patch in stack.patches]
    assert [item["sha256"] for item in report["patches"]] == [patch.sha256 for patch in stack.patches]
    inputs = {item["filename"]: item["sha256"] for item in report["inputs"]}
    assert inputs == {
        path.name: sha256_bytes(path.read_bytes()) for path in (patched.sdist, patched.root / OFFICIAL)
    }
    data = wheel.read_bytes()
    assert report["output"] == {"filename": wheel.name, "sha256": sha256_bytes(data), "size": len(data)}
    members = read_wheel(wheel)
    assert b"    return 100\n" in members["demo/core.py"]
    assert b"    return 900\n" in members["demo/core.py"]
    first, second, third = (patch.name for patch in stack.patches)
    assert members["demo/core.py"].endswith(f"(vLLM Blackwell stack) by {first}, {third}.\n".encode())
    assert members["demo/new.py"] == b"NEW = True\n"
    assert second in done.out
    assert "tests/test_core.py" not in members


def test_the_report_beside_the_wheel_names_no_folder(patched: Project) -> None:
    wheel = built(patched)
    text = wheel.with_name(f"{wheel.name}.json").read_text()
    assert str(patched.root) not in text
    document = json.loads(text)
    assert (document["command"], document["ok"]) == ("build-wheel", True)


def test_building_twice_gives_the_same_bytes(patched: Project) -> None:
    wheel = built(patched)
    first = {path.name: path.read_bytes() for path in dist(patched).iterdir()}
    shutil.rmtree(dist(patched))
    shutil.rmtree(patched.root / "cache" / "bases")
    assert built(patched) == wheel
    assert {path.name: path.read_bytes() for path in dist(patched).iterdir()} == first


def test_a_released_stack_has_its_number(patched: Project) -> None:
    patched.ok("release", "--target", "demo")
    assert built(patched).name.startswith("demo-1.0.0+bw.1-")
    assert built(patched, "--label", "acme").name.startswith("demo-1.0.0+bw.1.acme-")


def test_how_to_install_it_is_said(patched: Project) -> None:
    done = build(patched)
    wheel = str(dist(patched) / done.report["wheels"][0]["output"]["filename"])
    assert f"pip install '{wheel}'" in done.out
    assert f"uv pip install --torch-backend=auto '{wheel}'" in done.out
    assert f"demo=={done.report['wheels'][0]['version']}\n" in done.out
    assert done.report["install"]["constraints"] == [f"demo=={done.report['wheels'][0]['version']}"]


def test_a_uv_project_anywhere_finds_the_wheel_by_what_is_said(
    patched: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(patched.root)
    done = patched.ok("build-wheel", "--offline", "--output", 'a "b"')
    name = done.report["wheels"][0]["output"]["filename"]
    sources = tomllib.loads("\n".join(done.report["install"]["uv_sources"]))["tool"]["uv"]["sources"]
    assert Path(sources["demo"]["path"]) == patched.root / 'a "b"' / name
    assert Path(sources["demo"]["path"]).is_file()


@pytest.mark.parametrize("label", ["cpu", "myCPU.1", "a b", "scdcdcdcd"])
def test_a_bad_label_is_a_usage_error(patched: Project, label: str) -> None:
    done = build(patched, "--label", label)
    assert done.code == 2
    assert left(patched) == []


def commit_patch(project: Project, path: str, text: str, subject: str) -> None:
    project.ok("apply")
    project.write(path, text)
    project.commit(message(subject))
    project.ok("refresh")


@pytest.mark.parametrize("path", ["csrc/kernel.cu", "demo/_custom_ops.py", "setup.py", "demo/kernels/new.cu"])
def test_a_patch_of_compiled_parts_is_refused_by_name(wheels: Project, path: str) -> None:
    commit_patch(wheels, "demo/new.py", "A = 1\n", "[Core] Add a module")
    wheels.write(path, "// changed\n")
    wheels.commit(message("[Kernel] Change a kernel"))
    wheels.ok("refresh")
    done = build(wheels)
    assert done.code == 7
    (name,) = [patch.name for patch in wheels.stack.patches if "kernel" in patch.name]
    assert done.error["details"] == [f"{path} ({name})"]
    assert left(wheels) == []


def test_a_stack_that_changes_nothing_in_the_package_is_refused(wheels: Project) -> None:
    assert build(wheels).code == 7  # no patch at all
    commit_patch(wheels, "tests/test_new.py", "", "[Test] Add a test")
    done = build(wheels)
    assert done.code == 7
    assert "the wheel would be the official one" in done.err


def test_a_file_that_does_not_parse_is_refused(wheels: Project) -> None:
    commit_patch(wheels, "demo/new.py", "def f(:\n", "[Core] Add a fault")
    done = build(wheels)
    assert done.code == 7
    assert "demo/new.py" in done.err
    assert left(wheels) == []
    assert not dist(wheels).exists()


def test_a_link_is_refused(wheels: Project) -> None:
    wheels.ok("apply")
    (wheels.checkout / "demo" / "other.py").unlink()
    (wheels.checkout / "demo" / "other.py").symlink_to("core.py")
    wheels.commit(message("[Core] Make a link"))
    wheels.run("refresh")
    done = build(wheels)
    assert done.code == 7, done.err
    assert "symbolic links" in done.err
    assert "demo/other.py" in done.err
    assert left(wheels) == []


@pytest.mark.parametrize(("mode", "kind"), [("120000", "a symbolic link"), ("160000", "a submodule")])
def test_an_added_link_or_submodule_is_refused(wheels: Project, mode: str, kind: str) -> None:
    wheels.ok("apply")
    target = wheels.git("hash-object", "-w", "--stdin", stdin="core.py").strip()
    if mode == "160000":
        target = wheels.git("rev-parse", "HEAD").strip()
    wheels.git("update-index", "--add", "--cacheinfo", f"{mode},{target},demo/added")
    wheels.git("commit", "--quiet", "--file=-", stdin=message("[Core] Add a thing"))
    wheels.git("reset", "--quiet", "--hard")
    wheels.ok("refresh")
    done = build(wheels)
    assert done.code == 7, done.err
    (patch,) = wheels.stack.patches
    assert done.error["details"] == [f"demo/added ({patch.name}): {kind}"]
    assert left(wheels) == []


@pytest.mark.parametrize(
    "name", [b"demo/two\nlines.py", b"demo/\xff.py", b"demo/back\\slash.py", b"tests/\x1b[2J"]
)
def test_a_name_that_no_wheel_can_have_is_refused(wheels: Project, name: bytes) -> None:
    wheels.ok("apply")
    file = os.fsencode(wheels.checkout) + b"/" + name
    Path(os.fsdecode(file)).write_text("A = 1\n")
    wheels.write("demo/fine.py", "A = 1\n")
    wheels.commit(message("[Core] Add an odd name"))
    wheels.run("refresh")
    (patch,) = wheels.stack.patches
    done = build(wheels)
    assert done.code == 7, done.err
    (detail,) = done.error["details"]
    assert detail.isprintable()
    assert patch.name in detail
    assert "rename" in done.error["hint"]
    assert left(wheels) == []


def modes(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.external_attr >> 16 for item in archive.infolist()}


def commit_modes(project: Project, *paths: str) -> None:
    """Commit everything, with these files executable whatever git is configured to see."""
    for path in paths:
        (project.checkout / path).chmod(0o755)
    project.git("add", "--all", "--force")
    project.git("update-index", "--chmod=+x", *paths)
    project.git("commit", "--quiet", "--file=-", stdin=message("[Core] Make programs"))
    project.ok("refresh")


def test_programs_stay_programs(wheels: Project) -> None:
    wheels.ok("apply")
    wheels.write("demo/new.sh", "#!/bin/sh\n")
    wheels.write("demo/plain.sh", "#!/bin/sh\n")
    wheels.edit("demo/core.py", "return 1\n", "return 100\n")
    commit_modes(wheels, "demo/new.sh", "demo/core.py")
    found = modes(built(wheels))
    assert found["demo/new.sh"] == found["demo/core.py"] == 0o100755
    assert found["demo/plain.sh"] == found["demo/other.py"] == 0o100644


def test_a_change_of_the_mode_alone_is_in_the_wheel(wheels: Project) -> None:
    wheels.ok("apply")
    commit_modes(wheels, "demo/other.py")
    wheel = built(wheels)
    assert modes(wheel)["demo/other.py"] == 0o100755
    assert read_wheel(wheel)["demo/other.py"].startswith(b"VALUE = 1\n# Modified for ")
    assert wheels.run("verify", "--offline", str(wheel)).code == 0


def test_an_output_folder_that_cannot_be_one_is_a_build_error(patched: Project) -> None:
    file = patched.root / "file"
    file.write_text("")
    for folder in (file, file / "below", Path("/proc/dist")):
        done = build(patched, "--output", str(folder))
        assert done.code == 7, done.err
        assert "cannot write" in done.err
    assert file.read_text() == ""


def test_a_report_that_cannot_be_written_takes_the_wheel_with_it(patched: Project) -> None:
    wheel = built(patched)
    sidecar = wheel.with_name(f"{wheel.name}.json")
    wheel.unlink()
    sidecar.unlink()
    (sidecar / "in-the-way").mkdir(parents=True)
    assert build(patched).code == 7
    assert left(patched) == [sidecar.name]


def test_without_the_official_wheel_it_is_a_network_error(patched: Project) -> None:
    shutil.rmtree(patched.workspace.downloads)
    done = build(patched)
    assert done.code == 3
    assert not dist(patched).exists()


def test_a_damaged_download_is_an_integrity_error(patched: Project) -> None:
    (cached,) = patched.workspace.downloads.glob(f"*/{OFFICIAL}")
    cached.write_bytes(cached.read_bytes()[:-1] + b"x")
    assert build(patched).code == 4
    assert not dist(patched).exists()


def alter_base(project: Project) -> str:
    """Put the cached base at a commit with foreign code in a file that the stack changes."""
    assert project.base.git.git_dir is not None
    git, at = project.base.git, {"GIT_INDEX_FILE": str(project.root / "index")}
    git.run("read-tree", project.base.commit, env=at)
    data = git.blob(project.base.commit, "demo/core.py") + b"FOREIGN = True\n"
    blob = git.run("hash-object", "-w", "--stdin", stdin=data).text
    git.run("update-index", "--cacheinfo", f"100644,{blob},demo/core.py", env=at)
    tree = git.run("write-tree", env=at).text
    git.run("update-ref", BASE_REF, git.run("commit-tree", tree, stdin=b"altered\n").text)
    return str(project.base.git.git_dir)


def test_a_cached_base_at_another_commit_is_refused(patched: Project) -> None:
    folder = alter_base(patched)
    done = build(patched)
    assert done.code == 4
    assert folder in done.err
    assert done.error["hint"] == f"remove {folder} and run the command again"
    assert not dist(patched).exists()
    shutil.rmtree(folder)
    assert b"FOREIGN" not in read_wheel(built(patched))["demo/core.py"]


def test_a_damaged_base_is_not_blamed_on_the_wheel(patched: Project) -> None:
    wheel = built(patched)
    folder = patched.base.git.git_dir
    for damage in (lambda: alter_base(patched), lambda: patched.base.git.run("update-ref", "-d", BASE_REF)):
        damage()
        done = patched.run("verify", "--offline", str(wheel))
        assert done.code == 4
        assert done.error["hint"] == f"remove {folder} and run the command again"
        assert "damaged:" not in done.out


def test_a_repository_without_notice_is_refused(patched: Project) -> None:
    (patched.root / "NOTICE").unlink()
    done = build(patched)
    assert done.code == 2
    assert "NOTICE" in done.err


def test_the_built_wheel_verifies_and_a_later_stack_tells_it_apart(patched: Project) -> None:
    wheel = built(patched)
    done = patched.run("verify", "--offline", str(wheel))
    assert done.code == 0, done.out
    assert "as it should be" in done.out
    commit_patch(patched, "demo/other.py", "VALUE = 2\n", "[Core] Change the value")
    done = patched.run("verify", "--offline", str(wheel))
    assert done.code == 8
    assert [item["code"] for item in done.report["verified"][0]["findings"]] == ["stack-id"]


def test_the_official_wheel_is_said_to_be_unpatched(patched: Project) -> None:
    done = patched.run("verify", "--offline", str(patched.root / OFFICIAL))
    assert done.code == 8
    assert "unpatched" in [item["code"] for item in done.report["verified"][0]["findings"]]
    assert "demo 1.0.0: not patched" in done.out


def test_with_its_report_any_changed_byte_of_a_wheel_is_found(patched: Project) -> None:
    wheel = built(patched)
    data = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.start_dir + 40  # the permissions of the first member
    for at in (mode, mode + 1, *range(0, len(data), max(1, len(data) // 25))):
        wheel.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        done = patched.run("verify", "--offline", str(wheel))
        assert done.code == 8
        assert "report-mismatch" in [item["code"] for item in done.report["verified"][0]["findings"]]
    wheel.write_bytes(data)
    sidecar = wheel.with_name(f"{wheel.name}.json")
    for text in ("[]", "{", '{"output": {"filename": 5, "sha256": "00"}}', "[" * 100_000):
        sidecar.write_text(text)
        done = patched.run("verify", "--offline", str(wheel))
        assert [item["code"] for item in done.report["verified"][0]["findings"]] == ["report-invalid"]


def test_a_file_that_the_stack_leaves_alone_is_compared_with_the_sources(patched: Project) -> None:
    wheel = built(patched)
    wheel.with_name(f"{wheel.name}.json").unlink()
    rezip(wheel, {"demo/other.py": b"EVIL = 1\n", "demo/_custom_ops.py": b"EVIL = 2\n"}, fix_record=True)
    done = patched.run("verify", "--offline", str(wheel))
    assert done.code == 8
    found = [(item["code"], item["subject"]) for item in done.report["verified"][0]["findings"]]
    assert found == [("source-file", "demo/_custom_ops.py"), ("source-file", "demo/other.py")]


def test_without_sources_the_hashes_are_compared_and_it_is_said(patched: Project) -> None:
    wheel = built(patched)
    shutil.rmtree(patched.root / "cache")
    done = patched.run("verify", "--offline", str(wheel))
    assert done.code == 0, done.out
    (note,) = done.report["notes"]
    assert "compared by the wheel's own SBOM alone" in note


def test_a_wheel_is_verified_beside_a_stack_that_no_wheel_can_be_built_of(wheels: Project) -> None:
    done = wheels.run("verify", "--offline", str(wheels.root / OFFICIAL))  # the stack is empty
    assert done.code == 8
    assert "unpatched" in [item["code"] for item in done.report["verified"][0]["findings"]]
    assert "the wheel would be the official one" in done.report["notes"][0]


def test_what_is_no_wheel_of_a_target_is_told(patched: Project) -> None:
    assert patched.run("verify").code == 2
    assert patched.run("verify", "--python", "python3", OFFICIAL).code == 2
    garbage = patched.root / "garbage.whl"
    garbage.write_bytes(b"no zip")
    done = patched.run("verify", str(garbage))
    assert done.code == 8
    assert [item["code"] for item in done.report["verified"][0]["findings"]] == ["damaged"]
    other = make_wheel(
        patched.root / f"memo-1.0.0-{TAG}.whl", {}, {**INFO, "METADATA": b"Name: memo\nVersion: 1.0.0\n\n"}
    )
    done = patched.run("verify", str(other))
    assert done.code == 2
    assert "no target" in done.err


@pytest.fixture(scope="session")
def make_venv(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a maker of environments without pip, which take a tenth of a second."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("venv")
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        return folder

    return make


def install(venv: Path, wheel: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(venv / "cache")}
    words = ["pip", "install", "--offline", "--no-deps", "--python", str(venv / "bin" / "python"), str(wheel)]
    subprocess.run([sys.executable, "-m", "uv", *words], check=True, capture_output=True, env=environment)


def test_installations_are_verified(patched: Project, make_venv: Callable[[], Path]) -> None:
    wheel, venv = built(patched), make_venv()
    python = str(venv / "bin" / "python")
    done = patched.run("verify", "--offline", "--installed", "--python", python)
    assert done.code == 8
    assert [item["code"] for item in done.report["verified"][0]["findings"]] == ["not-installed"]
    install(venv, wheel)
    done = patched.run("verify", "--offline", "--installed", "--python", python)
    assert done.code == 0, done.out
    assert done.report["python"] == python
    install(venv, patched.root / OFFICIAL)
    done = patched.run("verify", "--offline", "--installed", "--python", python, "--target", "demo")
    assert done.code == 8
    assert [item["code"] for item in done.report["verified"][0]["findings"]] == ["unpatched"]
    assert "demo 1.0.0: not patched" in done.out


def test_a_second_installation_and_a_shadowed_one_are_found(
    patched: Project, make_venv: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, venv = built(patched), make_venv()
    install(venv, wheel)
    shadow = tmp_path / "shadow"
    with zipfile.ZipFile(patched.root / OFFICIAL) as archive:
        archive.extractall(shadow)
    words = ("verify", "--offline", "--installed", "--python", str(venv / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", str(shadow))
    found = [item["code"] for item in patched.run(*words).report["verified"][0]["findings"]]
    assert found == ["unpatched", "installed-twice"]
    shutil.rmtree(next(shadow.glob("*.dist-info")))
    found = [item["code"] for item in patched.run(*words).report["verified"][0]["findings"]]
    assert found == ["import-elsewhere"]
    # As the launcher hands it on; relative to the user's folder.
    monkeypatch.delenv("PYTHONPATH")
    assert patched.run(*words).code == 0
    monkeypatch.chdir(tmp_path)
    for value in ("shadow", f"{tmp_path}/none{os.pathsep}shadow"):
        monkeypatch.setenv("VLLM_STACK_USER_PYTHONPATH", value)
        found = [item["code"] for item in patched.run(*words).report["verified"][0]["findings"]]
        assert found == ["import-elsewhere"]


#: A step of a command that leaves a temporary file if it is ended there, and where that lies.
SLOW_STEPS = [
    ("build-wheel", "wheelwriter.WheelWriter", "finish", "dist/.demo-*.part"),
    ("build-wheel", "base", "_fast_import", "cache/bases/.import-*"),
    ("apply", "checkout", "_write_state", "upstream/.demo-*"),
]
SLOW = """
import importlib, sys, time
_, place, name, *words = sys.argv
module, _, inner = place.partition(".")
owner = importlib.import_module(f"vllm_stack.{module}")
setattr(getattr(owner, inner) if inner else owner, name, lambda *_: time.sleep(60))
from vllm_stack.cli import main
main(words)
"""


@pytest.mark.parametrize(("command", "place", "name", "temporary"), SLOW_STEPS)
def test_a_terminated_command_removes_its_temporary_files(
    patched: Project, command: str, place: str, name: str, temporary: str
) -> None:
    if place == "base":
        shutil.rmtree(patched.workspace.bases)
    shutil.rmtree(patched.checkout)
    words = [command, "--offline", "--root", str(patched.root), "--cache-dir", str(patched.root / "cache")]
    if command == "build-wheel":
        words += ["--output", str(dist(patched))]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, place, name, *words],
        env={**os.environ, "PYTHONPATH": str(Path(vllm_stack.__file__).parents[1])},
        stderr=subprocess.PIPE,
    )
    with process:
        deadline = time.monotonic() + 60
        while not list(patched.root.glob(temporary)):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        time.sleep(0.2)
        process.terminate()
    assert process.returncode == 143
    assert list(patched.root.glob(temporary)) == []
    assert not dist(patched).exists()


@pytest.mark.parametrize("name", ["build-wheel", "verify"])
def test_help_has_an_example(name: str, patched: Project) -> None:
    done = patched.run(name, "--help")
    assert done.code == 0
    assert f"Example: tools/vllm-stack {name} " in done.out
