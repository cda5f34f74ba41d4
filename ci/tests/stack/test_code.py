"""The project's own code keeps its own rules."""

from __future__ import annotations

import subprocess
import sys

import pytest

from realstacks import ROOT

#: Run, and so checked, in the environment of the patched wheels.
RUNTIME_TESTS = ("ci/gpu", "ci/tests/gguf", "ci/tests/runtime", "ci/tests/selection", "ci/tests/upstream")
RUNTIME_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


@pytest.mark.parametrize(
    "words",
    [
        ("ruff", "check", "--no-cache", "."),
        ("ruff", "format", "--no-cache", "--check", "."),
        ("mypy", "tools", "ci/tests/stack", *map(str, sorted((ROOT / "ci").glob("*.py")))),
        ("mypy", f"--python-executable={RUNTIME_PYTHON}", "ci/kernelcheck", *RUNTIME_TESTS),
        ("mypy", "--scripts-are-modules", "tools/vllm-stack"),
    ],
)
def test_linters(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_index_host_is_named() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    hosts = ("pypi" + ".org", "python" + "hosted.org", "registry." + "npmjs", "deb.debian" + ".org")
    for name in done.stdout.splitlines():
        text = (ROOT / name).read_bytes()
        assert not any(host.encode() in text for host in hosts), name
