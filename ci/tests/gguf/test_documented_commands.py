"""The commands of README.md and docs/gguf.md, as they are written, name and load a file without network."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from plugin_tree import REPOSITORY, run_python

if TYPE_CHECKING:
    import pytest

DOCUMENTS: Final = ("README.md", "docs/gguf.md")


def texts() -> list[str]:
    """Return the documents' texts with continued lines joined."""
    return [(REPOSITORY / name).read_text().replace("\\\n", " ") for name in DOCUMENTS]


def whole_commands() -> list[list[str]]:
    """Return the words of the commands that stand on lines of their own, without `vllm`."""
    lines = [line for text in texts() for line in re.findall(r"(?im)^    vllm (serve .*gguf.*)$", text)]
    return [shlex.split(line) for line in lines]


def test_documented_commands_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, file = whole_commands()
    guide = texts()[1]
    references = re.findall(r"`vllm serve (\S+) …`", guide)
    [speculative] = re.findall(r"(?m)^    (--speculative-config .*)$", guide)
    assert [name.rpartition(":")[2] for name in references] == ["UD-Q4_K_XL"] * 2
    commands = [readme, file, *(["serve", name, *file[2:]] for name in references)]
    commands += [[*words, *shlex.split(speculative)] for words in commands]
    models, hub = tmp_path / "models", tmp_path / "hf" / "hub"
    placed = [[word.replace("/models/", f"{models}/") for word in words] for words in commands]
    path = tmp_path / "commands.json"
    path.write_text(json.dumps(placed))
    monkeypatch.setenv("HF_HOME", str(hub.parent))

    done = run_python(Path(__file__).with_name("serve_commands.py"), path, models, hub)

    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    expected = {"ranks": 8, "cache": "bfloat16", "length": 131072, "quantization": "gguf", "different": []}
    names = [readme[1], *["glm-5.2"] * 3]
    assert found == [
        {**expected, "served": name, "drafts": drafts} for drafts in (False, True) for name in names
    ]
