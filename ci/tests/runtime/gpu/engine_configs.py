"""Have vLLM check the arguments of every engine of TRITON_MLA_SPARSE, as on an SM90 chip.

``python engine_configs.py FOLDER``: writes the models' configurations into the folder, and prints a JSON
object with the number of engines and, by the name of its job, why a configuration was refused. GLM-5.3-Flash
is left out: its model file imports torchvision. The folders ``ci`` and ``ci/gpu`` are on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine_jobs
import engine_proof
import small_models
import soak

from kernelcheck.chips import chip
from kernelcheck.platform import pretend

if TYPE_CHECKING:
    from collections.abc import Iterator

SWITCHES = ("VLLM_BATCH_INVARIANT", "VLLM_GPU_SYNC_CHECK", "VLLM_USE_BREAKABLE_CUDAGRAPH")


def jobs() -> Iterator[engine_jobs.Job]:
    """Yield our engine of every mode."""
    for proof in engine_proof.PROOFS.values():
        yield from proof.modes(proof.models)
    yield from soak.ENGINES


def main() -> None:
    """Make every configuration."""
    pretend(chip(90))
    engine_args = import_module("vllm.engine.arg_utils").EngineArgs
    folder = Path(sys.argv[1])
    chosen = [job for job in dict.fromkeys(jobs()) if not small_models.MODELS[job.model].is_pooled]
    refused: dict[str, str] = {}
    for job in chosen:
        model = folder / job.model
        model.mkdir(exist_ok=True)
        small_models.write_configs(small_models.MODELS[job.model], model)
        for name in SWITCHES:
            os.environ.pop(name, None)
        os.environ.update(engine_jobs.environment(job))
        try:
            config: Any = engine_args(**engine_jobs.engine_arguments(job, model)).create_engine_config()
            assert config.cache_config.cache_dtype == job.cache, config.cache_config.cache_dtype
        except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
            refused[job.name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"engines": len(chosen), "refused": refused}))


if __name__ == "__main__":
    main()
