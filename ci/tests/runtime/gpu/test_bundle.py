"""The bundle for a GPU host has what GGUF files need, in the release that the tests have."""

from __future__ import annotations

import re
import subprocess

import make_bundle


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
