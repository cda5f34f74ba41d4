"""The bundle for a GPU host has what GGUF files need, in the release that the tests have."""

from __future__ import annotations

import re

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
