"""Proofs that run beside each other never read half of what the machine is described by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import engine_runner

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_description_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_runner, "describe_host", lambda: {"card": "new"})
    path = tmp_path / "host.json"
    path.write_text(json.dumps({"card": "old"}))
    with path.open() as reader:
        assert engine_runner.host(tmp_path, reuse=True) == {"card": "old"}
        assert engine_runner.host(tmp_path, reuse=False) == {"card": "new"}
        assert json.load(reader) == {"card": "old"}  # replaced, not written over
    assert list(tmp_path.iterdir()) == [path]
