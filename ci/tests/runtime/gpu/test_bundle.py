"""What calls on a GPU host carry: the bundle's packages and sizes, and files of this tree's stack alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from typing import TYPE_CHECKING

import make_bundle

if TYPE_CHECKING:
    from pathlib import Path


def test_gguf_and_what_it_imports_are_bundled() -> None:
    locked = (make_bundle.HERE.parent / "requirements-vllm.txt").read_text()
    release = re.search(r"^gguf==(\S+)", locked, re.MULTILINE)
    assert release is not None
    assert f"gguf=={release[1]}" in make_bundle.EXTRA
    # Of the tokenizers' requirements, which come with vLLM's.
    assert re.search(r"^pycountry==", locked, re.MULTILINE)
    assert not make_bundle.SKIP.match("pycountry")
    assert make_bundle.SKIP.match("torch")
    have = (make_bundle.HERE / "host-packages.txt").read_text().split()
    assert {"numpy", "pyyaml", "requests", "tqdm"} <= set(have)
    assert "pycountry" not in have


def test_a_piece_travels_with_the_tracked_files() -> None:
    root = make_bundle.HERE.parents[1]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    tracked = [root / name for name in listed.stdout.split("\0") if name]
    size = sum(path.lstat().st_size for path in tracked if path.exists())
    assert tracked
    assert make_bundle.PIECE_MB + size / 2**20 < 60  # of 64 MiB; the last call carries the wheel's files, too


def go(tree: Path, stack_id: str) -> subprocess.CompletedProcess[str]:
    """Run go.sh in a tree whose .gpuwork holds files of a stack."""
    with zipfile.ZipFile(tree / ".gpuwork" / "files.zip", "w") as archive:
        archive.writestr("manifest.json", json.dumps({"stack_id": stack_id}))
    return subprocess.run(
        ["bash", tree / "ci" / "gpu" / "go.sh", "--help"],
        env=os.environ | {"OUT": str(tree / "out")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_files_of_another_stack_are_refused(tmp_path: Path) -> None:
    ci = make_bundle.HERE.parent
    (tmp_path / ".gpuwork").mkdir()
    (tmp_path / "ci" / "gpu").mkdir(parents=True)
    shutil.copy(ci / "matrix.json", tmp_path / "ci")
    for name in ("go.sh", "run.py", "wheel_files.py"):
        shutil.copy(ci / "gpu" / name, tmp_path / "ci" / "gpu")
    own, plugins = (target["stack_id"] for target in json.loads((ci / "matrix.json").read_text())["targets"])
    for other in ("0" * 64, plugins):
        refused = go(tmp_path, other)
        assert refused.returncode == 1
        assert refused.stderr.startswith(
            f"go.sh: .gpuwork/files.zip is of the stack {other[:8]}, this tree's is {own[:8]}"
        )
    accepted = go(tmp_path, own)
    assert accepted.returncode == 0, accepted.stderr
    assert accepted.stdout.startswith("usage: run.py")
