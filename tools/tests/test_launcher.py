"""The launcher: real environments, made from a local wheel, in small copies of the repository."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vllm_stack import errors, installed

TOOLS = Path(__file__).parents[1]
LAUNCHER = TOOLS / "vllm-stack"
#: Stands for the tool: says what it sees. "exit N" makes it exit with N.
TOOL = """
import json, os, sys
import tinydep
print(json.dumps({
    "arguments": sys.argv[1:], "cwd": os.getcwd(), "dependency": tinydep.VERSION, "path": sys.path,
    "isolated": sys.flags.isolated, "prefix": sys.prefix, "stdin": sys.stdin.read(),
    "variables": sorted(key for key in os.environ if key.startswith("PYTHON")),
    "user_path": os.environ.get("VLLM_STACK_USER_PYTHONPATH"),
}))
if sys.argv[1:2] == ["exit"]:
    sys.exit(int(sys.argv[2]))
"""


def build_wheel(folder: Path, version: str) -> str:
    """Write a wheel of ``tinydep`` and return the line that locks it."""
    info = f"tinydep-{version}.dist-info"
    members = {
        "tinydep.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinydep\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*members, f"{info}/RECORD"))
    wheel = folder / f"tinydep-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in members.items():
            # Without a date, so that each call writes the same bytes.
            archive.writestr(zipfile.ZipInfo(name), text)
    return f"tinydep=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="module")
def base_environment(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a user whose pip finds the local wheels alone, and whose ``python3`` is this one."""
    programs = tmp_path_factory.mktemp("programs")
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    dropped = ("PIP_", "PYTHON", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {
        **kept,
        "PATH": f"{programs}{os.pathsep}{kept['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheelhouse),
    }


def new_repository(place: Path, wheelhouse: Path) -> Path:
    tools = place / "tools"
    (tools / "vllm_stack").mkdir(parents=True)
    shutil.copy2(LAUNCHER, tools)
    (tools / "vllm_stack" / "__init__.py").touch()
    (tools / "vllm_stack" / "__main__.py").write_text(TOOL)
    (tools / "requirements.txt").write_text("# locked\n" + build_wheel(wheelhouse, "1.0"))
    return place


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, wheelhouse: Path, base_environment: dict[str, str]
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A repository in a folder with a space, after its first run; and what that said."""
    repository = new_repository(tmp_path_factory.mktemp("launcher") / "my repository", wheelhouse)
    return repository, launch(repository, base_environment, "first")


@pytest.fixture
def fresh(tmp_path: Path, wheelhouse: Path) -> Path:
    """A repository that was never used."""
    return new_repository(tmp_path / "repository", wheelhouse)


@pytest.fixture
def used(tmp_path: Path, made: tuple[Path, Any]) -> Path:
    """A copy of the repository after its first run."""
    return Path(shutil.copytree(made[0], tmp_path / "used", symlinks=True))


def launch(
    repository: Path, environment: dict[str, str], *arguments: str, cwd: Path | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [repository / "tools" / "vllm-stack", *arguments],
        env=environment,
        cwd=cwd or repository.parent,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def seen(completed: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert completed.returncode == 0, completed.stderr
    result: dict[str, Any] = json.loads(completed.stdout)
    return result


# -- the first use and the ones after it


def test_the_first_use_makes_the_environment(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    repository, first = made
    result = seen(first)
    assert result["dependency"] == "1.0"
    assert result["prefix"] == str(repository / ".venv")
    lines = first.stderr.splitlines()
    assert all(line.startswith("vllm-stack: ") for line in lines)
    assert (lines[0].split()[1], lines[-1]) == ("making", "vllm-stack: ready")


def test_later_uses_are_silent_and_fast(
    made: tuple[Path, subprocess.CompletedProcess[str]], base_environment: dict[str, str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        completed = launch(made[0], base_environment)
        assert seen(completed)["dependency"] == "1.0"
        assert completed.stderr == ""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, so that a busy machine is no failure.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * 0.5


def test_help_imports_none_of_the_slow_libraries() -> None:
    program = (
        "import sys\nfrom vllm_stack.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'rich', 'pydantic', 'requests', 'pypi_simple', 'cyclonedx'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.splitlines()[-1] == "[]"


def test_arguments_streams_and_exit_code_pass_through(
    made: tuple[Path, Any], base_environment: dict[str, str], tmp_path: Path
) -> None:
    arguments = ["exit", "7", "a b", "", "line\nbreak", "--help", "ümlaut"]
    completed = launch(made[0], base_environment, *arguments, cwd=tmp_path, stdin="input")
    result = json.loads(completed.stdout)
    assert completed.returncode == 7
    assert (result["arguments"], result["cwd"], result["stdin"]) == (arguments, str(tmp_path), "input")


def test_a_symbolic_link_elsewhere_works(
    made: tuple[Path, Any], base_environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "vllm-stack").symlink_to(made[0] / "tools" / "vllm-stack")
    assert seen(launch(tmp_path, base_environment, cwd=tmp_path))["prefix"] == str(made[0] / ".venv")


def test_variables_of_another_python_misleading_pip_options_and_no_home_do_no_harm(
    fresh: Path, base_environment: dict[str, str], tmp_path: Path
) -> None:
    rubbish = tmp_path / "rubbish"
    rubbish.mkdir()
    for module in ("tinydep", "json", "os", "venv", "ensurepip", "pip", "vllm_stack", "sitecustomize"):
        (rubbish / f"{module}.py").write_text("raise SystemExit('the wrong module')\n")
    options = {"TARGET": str(tmp_path / "elsewhere"), "USER": "1", "DRY_RUN": "1", "NO_BINARY": ":all:"}
    environment = {
        **{key: value for key, value in base_environment.items() if key != "HOME"},
        **{f"PIP_{name}": value for name, value in options.items()},
        "PYTHONPATH": str(rubbish),
        "PYTHONHOME": "/nonexistent",
        "PYTHONSTARTUP": str(rubbish / "os.py"),
        "PYTHONWARNINGS": "error",
    }
    for _ in range(2):
        result = seen(launch(fresh, environment, cwd=rubbish))
        assert result["isolated"] == 1
        assert not {str(rubbish), ""} & set(result["path"])
        assert result["variables"] == ["PYTHONSTARTUP", "PYTHONWARNINGS"]
    assert not (tmp_path / "elsewhere").exists()


def test_the_users_python_path_is_handed_on(made: tuple[Path, Any], base_environment: dict[str, str]) -> None:
    stale = {**base_environment, "VLLM_STACK_USER_PYTHONPATH": "/of/another/call"}
    for value, expected in (("/a:b", "/a:b"), ("", None), (None, None)):
        environment = stale if value is None else {**stale, "PYTHONPATH": value}
        assert seen(launch(made[0], environment))["user_path"] == expected
    names = runpy.run_path(str(LAUNCHER), run_name="launcher")
    assert names["USER_PYTHONPATH"] == installed.USER_PYTHONPATH


def test_the_environment_moves_with_the_repository(used: Path, base_environment: dict[str, str]) -> None:
    moved = used.rename(used.with_name("moved away"))
    completed = launch(moved, base_environment)
    assert seen(completed)["path"][-1] == str(moved / "tools")
    assert completed.stderr == ""


# -- environments that are not as they should be


def check_made_anew(repository: Path, environment: dict[str, str], dependency: str = "1.0") -> None:
    completed = launch(repository, environment)
    assert "making" in completed.stderr
    assert seen(completed)["dependency"] == dependency
    assert launch(repository, environment).stderr == ""


def test_a_changed_lock_file_is_installed(
    used: Path, base_environment: dict[str, str], wheelhouse: Path
) -> None:
    (used / "tools" / "requirements.txt").write_text(build_wheel(wheelhouse, "2.0"))
    check_made_anew(used, base_environment, "2.0")


def test_an_environment_whose_python_is_gone_is_made_anew(
    used: Path, base_environment: dict[str, str]
) -> None:
    for python in (used / ".venv" / "bin").glob("python*"):
        python.unlink()
        python.symlink_to("/nonexistent/python")
    check_made_anew(used, base_environment)


def test_an_interrupted_first_use_is_repeated(fresh: Path, base_environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [fresh / "tools" / "vllm-stack"],
        env=base_environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        deadline = time.monotonic() + 60
        while not (fresh / ".venv" / "bin" / "python").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (fresh / ".venv" / "vllm-stack-stamp").exists()
    check_made_anew(fresh, base_environment)


def test_two_first_uses_at_once_make_it_once(fresh: Path, base_environment: dict[str, str]) -> None:
    processes = [
        subprocess.Popen(
            [fresh / "tools" / "vllm-stack"],
            env=base_environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [(process.communicate(), process.returncode) for process in processes]
    assert [(json.loads(output)["dependency"], code) for (output, _), code in ends] == [("1.0", 0)] * 2
    assert (
        sum("making " in line for (_, text), _ in ends for line in text.splitlines() if "another" not in line)
        == 1
    )
    assert sum("waiting for another process" in text for (_, text), _ in ends) == 1


def test_somebody_elses_environment_is_left_alone(fresh: Path, base_environment: dict[str, str]) -> None:
    (fresh / ".venv").mkdir()
    (fresh / ".venv" / "precious").write_text("precious")
    completed = launch(fresh, base_environment)
    assert completed.returncode == errors.UsageError.exit_code
    assert "move it away" in completed.stderr
    assert [path.name for path in (fresh / ".venv").iterdir()] == ["precious"]


def test_an_environment_may_be_a_link_to_another_disk(
    fresh: Path, base_environment: dict[str, str], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    (disk / "lib").mkdir(parents=True)
    (disk / "made-by-vllm-stack").write_text("an earlier run, interrupted")
    (disk / "lib" / "left over").write_text("")
    (fresh / ".venv").symlink_to(disk)
    check_made_anew(fresh, base_environment)
    assert (fresh / ".venv").is_symlink()
    assert not (disk / "lib" / "left over").exists()


# -- failures


def test_a_package_that_is_not_found_ends_with_network(fresh: Path, base_environment: dict[str, str]) -> None:
    lock = fresh / "tools" / "requirements.txt"
    lock.write_text(lock.read_text().replace("1.0", "9.9"))
    completed = launch(fresh, base_environment)
    assert completed.returncode == errors.NetworkError.exit_code
    assert "tinydep==9.9" in completed.stderr
    assert "pip config debug" in completed.stderr
    assert not (fresh / ".venv" / "vllm-stack-stamp").exists()


def test_a_package_with_another_hash_ends_with_integrity(
    fresh: Path, base_environment: dict[str, str]
) -> None:
    (fresh / "tools" / "requirements.txt").write_text(f"tinydep==1.0 --hash=sha256:{'ab' * 32}\n")
    completed = launch(fresh, base_environment)
    assert completed.returncode == errors.IntegrityError.exit_code
    assert not list((fresh / ".venv").glob("lib/*/site-packages/tinydep.py"))


def test_a_missing_lock_file_is_a_clear_error(fresh: Path, base_environment: dict[str, str]) -> None:
    (fresh / "tools" / "requirements.txt").unlink()
    completed = launch(fresh, base_environment)
    assert completed.returncode == errors.UsageError.exit_code
    assert "requirements.txt" in completed.stderr
    assert "Traceback" not in completed.stderr


# -- an older python3


def launch_with_old_python(
    repository: Path, environment: dict[str, str], programs: Path
) -> subprocess.CompletedProcess[str]:
    """Run the launcher as Python 3.9 would see it, with ``programs`` alone on PATH."""
    program = (
        "import runpy, sys; sys.version_info = (3, 9, 18, 'final', 0)\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-I", "-c", program, str(repository / "tools" / "vllm-stack")],
        env={**environment, "PATH": str(programs)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_older_python_uses_a_newer_one_on_path(
    fresh: Path, base_environment: dict[str, str], tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    write_program(programs / "python3.11", "exit 127  # a shim of a version that is not active")
    (programs / "python3.12").write_text("not a program")
    (programs / "python3.13").symlink_to(Path(sys.executable).resolve())
    completed = launch_with_old_python(fresh, base_environment, programs)
    assert seen(completed)["dependency"] == "1.0"
    assert f"using {programs / 'python3.13'}" in completed.stderr


def test_an_older_python_alone_is_a_clear_error(
    fresh: Path, base_environment: dict[str, str], tmp_path: Path
) -> None:
    completed = launch_with_old_python(fresh, base_environment, tmp_path)
    assert completed.returncode == errors.UsageError.exit_code
    assert "needs Python 3.11 or newer" in completed.stderr
    assert "is Python 3.9.18" in completed.stderr
    assert not (fresh / ".venv").exists()


def test_an_older_python_runs_an_environment_that_is_ready(
    used: Path, base_environment: dict[str, str], tmp_path: Path
) -> None:
    completed = launch_with_old_python(used, base_environment, tmp_path)
    assert (seen(completed)["dependency"], completed.stderr) == ("1.0", "")


def test_the_launcher_is_valid_for_python_3_6() -> None:
    tree = ast.parse(LAUNCHER.read_text(), feature_version=(3, 6))
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imports == {"os", "sys", "hashlib", "subprocess", "shutil", "glob", "fcntl"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_the_launcher_ends_with_the_documented_codes() -> None:
    names = runpy.run_path(str(LAUNCHER), run_name="launcher")
    codes = {errors.EXIT_CODES[names[name]] for name in ("USAGE", "NETWORK", "INTEGRITY", "INTERRUPTED")}
    assert codes == {"usage", "network", "integrity", "interrupted"}
