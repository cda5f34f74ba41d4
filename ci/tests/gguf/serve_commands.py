"""Read commands as `vllm serve` does, and load the file that each names, on a CPU.

    python serve_commands.py COMMANDS.json MODELS HUB

Writes, in the folder MODELS and in the hub's cache HUB, a small model under the names that the documents
use: eleven shards in a subfolder, the first one empty, and no config.json beside them; the config is in the
cache of its own repository. Prints one line, `FOUND` and a JSON list: what vLLM makes of each command, and
what its model and draft model hold in another way than the file's weights say. The plugin's test modules
have to be importable.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import cmd_init
from vllm.entrypoints.common.cli_args import validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

QUANT = "UD-Q4_K_XL"
REVISION = "0" * 40


def snapshot(hub: Path, repository: str) -> Path:
    """Return the folder of a repository's one revision in the hub's cache."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(REVISION)
    files = folder / "snapshots" / REVISION
    files.mkdir(parents=True, exist_ok=True)
    return files


def write(models: Path, hub: Path) -> tuple[Any, Any]:
    """Write the model where the commands look for it; return its config and tensors."""
    files = import_module("glm_dsa_files")
    config = files.glm_dsa_config(max_position_embeddings=1 << 17)
    tensors = files.glm_dsa_tensors(config)
    config.save_pretrained(snapshot(hub, "zai-org/GLM-5.2"))
    folder = models / "GLM-5.2-GGUF" / QUANT
    folder.mkdir(parents=True)
    path = folder / f"GLM-5.2-{QUANT}.gguf"
    shards = {"per_shard": 10, "empty_first_shard": True}
    import_module("known_gguf").write_gguf(path, tensors.values(), arch="glm-dsa", **shards)
    (snapshot(hub, "unsloth/GLM-5.2-GGUF") / QUANT).symlink_to(folder, target_is_directory=True)
    return config, tensors


def engine_config(words: list[str]) -> Any:
    """Return the engine's configuration of the command `vllm WORDS`."""
    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(required=True, dest="subparser")
    for command in cmd_init():
        command.subparser_init(commands)
    arguments = parser.parse_args(words)
    validate_parsed_serve_args(arguments)
    arguments.model = arguments.model_tag
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def loaded(words: list[str], config: Any, tensors: Any) -> list[str]:
    """Load what the command names on one rank, and return what is held in another way than it must."""
    models, reference = import_module("cpu_models"), import_module("glm_dsa_reference")
    engine = engine_config([*words, "--tensor-parallel-size", "1"])
    model = models.load_model(engine, reference.MODEL_CLASSES["CUDA"])
    found = list(reference.differences(model, reference.Reference(config, tensors).model()))
    if engine.speculative_config:
        draft = models.load_model(engine, reference.DRAFT_CLASSES["CUDA"], draft=True)
        found += reference.differences(draft, reference.Reference(config, tensors).draft())
    return found


def main() -> None:
    """Read and load."""
    commands = json.loads(Path(sys.argv[1]).read_text())
    config, tensors = write(Path(sys.argv[2]), Path(sys.argv[3]))
    found = []
    for words in commands:
        engine = engine_config(words)
        found.append(
            {
                "ranks": engine.parallel_config.tensor_parallel_size,
                "cache": engine.cache_config.cache_dtype,
                "length": engine.model_config.max_model_len,
                "quantization": engine.model_config.quantization,
                "served": engine.model_config.served_model_name,
                "drafts": bool(engine.speculative_config),
                "different": loaded(words, config, tensors),
            }
        )
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
