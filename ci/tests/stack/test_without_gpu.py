"""ci/without-gpu runs a command with the environment of the runtime tests, and says when there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "without-gpu"
#: What a test of Triton kernels needs to see on a machine without a GPU.
SEEN = (
    'echo "$CUDA_VISIBLE_DEVICES|$TRITON_INTERPRET|$HF_HUB_OFFLINE|$PYTEST_ADDOPTS|$PYTHONPATH"'
    '"|$(command -v python)"'
)


def run(root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program = root / "ci" / "without-gpu"
    program.parent.mkdir(exist_ok=True)
    shutil.copy(PROGRAM, program)
    command = [str(program), "sh", "-c", SEEN]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_the_environment_it_says_how_to_make_it(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no {tmp_path}/.venv-vllm: run ci/test --setup first" in done.stderr


def test_a_command_gets_the_environment_and_the_plugin(tmp_path: Path) -> None:
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    done = run(tmp_path, CUDA_VISIBLE_DEVICES="0", PYTHONPATH="/elsewhere", PYTEST_ADDOPTS="-k 'a or b'")
    assert done.returncode == 0, done.stderr
    cuda, interpret, offline, options, paths, found = done.stdout.rstrip("\n").split("|")
    assert (cuda, interpret, offline, options) == ("", "1", "1", "-p interpret_plugin -k 'a or b'")
    assert paths.split(":") == [f"{tmp_path}/ci/tests/upstream", f"{tmp_path}/ci"]
    assert Path(found) == python
    assert (PROGRAM.parent / "tests" / "upstream" / "interpret_plugin.py").is_file()
