"""What the patches of both targets give together, and what loading costs, with the installed wheels.

Uses the files and references that the patched plugin's tests write and work out (`PATCHED_PLUGIN_TREE`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from plugin_tree import REPOSITORY, TREE, run_python

if TYPE_CHECKING:
    from pathlib import Path

KINDS: Final = ["full", "shared", "full"]
SCRIPT: Final = """
import json, sys
from pathlib import Path
from cpu_models import engine_config, load_model
from glm_dsa_files import glm_dsa_config, write_model
from glm_dsa_reference import MODEL_CLASSES

folder = Path(sys.argv[1])
config = glm_dsa_config(index_topk_freq=1, indexer_types=json.loads(sys.argv[2]))
path = write_model(folder, config)
content = json.loads((folder / "config.json").read_text())
del content["index_topk_freq"], content["index_skip_topk_offset"]
(folder / "config.json").write_text(json.dumps(content))
found = {}
for label, model_class in MODEL_CLASSES.items():
    model = load_model(engine_config(path, folder), model_class)
    names = [name for name, _ in model.named_parameters() if ".indexer.k_norm.weight" in name]
    found[label] = [int(name.split(".")[2]) for name in names]
print("FOUND", json.dumps(found))
"""


def test_layers_have_an_indexer_where_indexer_types_say_so(tmp_path: Path) -> None:
    done = run_python("-c", SCRIPT, tmp_path, json.dumps(KINDS))
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert json.loads(line.removeprefix("FOUND ")) == {"generic": [0, 2], "CUDA": [0, 2]}


@pytest.fixture(scope="module")
def load_report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load a file of some hundred megabytes on two ranks and return what it took.

    Of four layers, what is kept of each layer's `kv_b_proj` is more than the slack.
    """
    path = tmp_path_factory.mktemp("load") / "load.json"
    script = REPOSITORY / "ci/gpu/gguf_load.py"
    size = ["--ranks", "2", "--layers", "4", "--experts", "2"]
    done = run_python(script, "--plugin-tests", TREE / "tests", *size, "--out", path)
    assert path.exists(), done.stdout + done.stderr
    return json.loads(path.read_text())


def test_rank_takes_its_share_and_at_most_one_tensor_more(load_report: Any) -> None:
    assert [rank["rank"] for rank in load_report["ranks"]] == [0, 1]
    for rank in load_report["ranks"]:
        assert rank["peak"] <= rank["allowed"], load_report
        # The bound tells a copy of the file from a share of it.
        assert rank["allowed"] < rank["held"] + load_report["file_bytes"], load_report


def test_rank_holds_its_share(load_report: Any) -> None:
    size = load_report["file_bytes"]
    for rank in load_report["ranks"]:
        # Attention's down projections are on every rank, and kv_b_proj is not quantized.
        assert size / 2 < rank["held"] < size * 0.75, load_report
