"""Run one engine on a GGUF file or on its bf16 twin: score text, continue it with drafts, time decoding.

    python gguf_worker.py JOB.json

Writes JOB.npz with log-probabilities and JOB.result.json with figures; exits 0 only if both are complete.
With `kernels` set to `dequantized`, the plugin's two products are replaced, in this process only, by products
with the dequantized weights: then nothing but the loading differs from the bf16 twin. With `eight-bit` these
products round what they multiply to blocks of 8 bits, as the plugin's compiled kernels for many tokens do:
the difference to `dequantized` is what this rounding makes, and kernels may make no more. With
`wrong-expert` each expert's weights are the next one's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from engine_jobs import WITHOUT_MULTICAST

TIMED_PROMPT: Final = 512
TIMED_TOKENS: Final = 128
TIMED_BATCHES: Final = (1, 8)
CONTINUED_TOKENS: Final = 64
STAND_INS: Final = ("dequantized", "eight-bit", "wrong-expert")
"""What replaces the plugin's products."""


@dataclass(frozen=True)
class GgufJob:
    """One engine.

    Attributes:
        name: Name of the job, usable as a file name.
        model: Path of a GGUF file, or folder of a checkpoint.
        config: Folder of the config.json.
        backend: Name of an attention backend.
        kernels: `compiled` or `triton`, the plugin's, or one of `STAND_INS`.
        ranks: Tensor parallel size.
        drafted: Tokens that the MTP layer drafts; the text is then continued, too.
        graphs: Whether the model is compiled and CUDA graphs are captured, as a server does.
        timed: Whether decoding is timed, after the text was scored; with graphs.
        dummy: Whether weights are made up, for timing a model that is in no file.

    """

    name: str
    model: str
    config: str
    backend: str
    kernels: str = "compiled"
    ranks: int = 1
    drafted: int = 0
    graphs: bool = False
    timed: bool = False
    dummy: bool = False


def engine_arguments(job: GgufJob) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`."""
    graphs = job.graphs or job.timed
    arguments: dict[str, Any] = {
        "model": job.model,
        "hf_config_path": job.config,
        "tokenizer": job.config,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.9 if job.timed else 0.05,
        "kv_cache_memory_bytes": 2 << 30,
        "seed": 0,
        "disable_log_stats": True,
        "enforce_eager": not graphs,
        "attention_backend": job.backend,
        "tensor_parallel_size": job.ranks,
        "kernel_config": {"enable_cutedsl_warmup": False},
    }
    if job.ranks > 1:
        arguments |= {"distributed_executor_backend": "mp", "worker_extension_cls": "gguf_ranks.GgufRank"}
    if graphs:  # of as many rows as the requests have with their drafts
        sizes = [requests * (1 + job.drafted) for requests in TIMED_BATCHES]
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if job.dummy:
        arguments["load_format"] = "dummy"
    if job.drafted:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": job.drafted}
    return arguments


def eight_bits(x: Any) -> Any:
    """Round to blocks of 32 numbers of 8 bits with a common scale in float16, as float32."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    numbers = (blocks / scale.clamp_min(1e-30)).round()
    return (numbers * scale.half().float()).flatten(-2)


def means_of_blocks(x: Any) -> Any:
    """Replace each number by the mean of its block of 32, whose sum is a float16."""
    blocks = x.float().unflatten(-1, (-1, 32))
    return (blocks.sum(-1, keepdim=True).half().float() / 32).expand_as(blocks).flatten(-2)


def minima_of(qweight: Any, kind: int) -> Any:
    """Return blocks of Q4_K or Q5_K of which only the minima are left: the scale, the first half, is zero."""
    import gguf

    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)][1]
    blocks = qweight.clone()
    blocks.unflatten(-1, (-1, size))[..., :2] = 0
    return blocks


def multiply_dequantized(kernels: str) -> None:
    """Replace the plugin's products by products of dequantized weights, as one of `STAND_INS` does them."""
    import gguf
    import torch
    from vllm_gguf_plugin import ops, quantization

    rounded, shift = kernels == "eight-bit", int(kernels == "wrong-expert")
    with_minima = (gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q5_K)

    def weight_of(qweight: torch.Tensor, kind: int, dtype: torch.dtype) -> torch.Tensor:
        if kind in quantization.UNQUANTIZED_TYPES:
            return qweight.to(dtype)
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        shape = (qweight.shape[0], qweight.shape[1] // size * block)
        weight: torch.Tensor = ops.ggml_dequantize(qweight.contiguous(), kind, *shape, torch.float32)
        return weight.to(dtype)

    def product(x: torch.Tensor, qweight: torch.Tensor, kind: int) -> torch.Tensor:
        if not rounded or kind in quantization.UNQUANTIZED_TYPES:
            return x @ weight_of(qweight, kind, x.dtype).T
        near = eight_bits(x)
        exact: torch.Tensor = near @ weight_of(qweight, kind, torch.float32).T
        if kind in with_minima:  # they are multiplied by sums that were not rounded to 8 bits
            exact += (means_of_blocks(x) - near) @ weight_of(minima_of(qweight, kind), kind, torch.float32).T
        return exact.to(x.dtype)

    def experts(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
        ids: torch.Tensor, kind1: int, kind2: int, activation: str,
    ) -> torch.Tensor:  # fmt: skip
        assert activation == "silu", activation
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(w1.shape[0]):
            rows, slot = (ids == expert).nonzero(as_tuple=True)
            read = (expert + shift) % len(w1)
            gate, up = product(x[rows], w1[read], kind1).chunk(2, dim=-1)
            inner = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
            share = product(inner, w2[read], kind2).float() * weights[rows, slot, None]
            out.index_add_(0, rows, share)
        return out.to(x.dtype)

    quantization.fused_mul_mat_gguf = product
    quantization.fused_moe_gguf = experts


def timed(engine: Any, batch: int) -> dict[str, float]:
    """Return how fast a batch decodes, without its prefill."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + n) % 500 for i in range(TIMED_PROMPT)]} for n in range(batch)]

    def seconds(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        started = time.monotonic()
        engine.generate(prompts, params, use_tqdm=False)
        return time.monotonic() - started

    seconds(4)  # whatever is compiled or tuned on first use
    first, whole = seconds(1), seconds(TIMED_TOKENS + 1)
    return {"prefill_seconds": first, "tokens_per_second": batch * TIMED_TOKENS / (whole - first)}


def continued(engine: Any, text: list[list[int]]) -> dict[str, Any]:
    """Continue the text by tokens that the engine chooses; return them, the engine's steps and its drafts.

    An engine that accepts no draft needs a step for each token.
    """
    from engine_tasks import count_steps
    from engine_worker import generate
    from scheduling import DraftWatch

    steps, drafts = count_steps(engine), DraftWatch(engine)
    _, tokens = generate(engine, text, CONTINUED_TOKENS)
    counts = {"steps": len(steps), "drafts": drafts.as_json()}
    return {"tokens": tokens, "tokens_each": CONTINUED_TOKENS} | counts


def choose_kernels(job: GgufJob) -> None:
    """Make the plugin use the kernels that the job names.

    Raises:
        RuntimeError: If the compiled ones cannot be imported.

    """
    if job.kernels in STAND_INS:
        multiply_dequantized(job.kernels)
    elif job.kernels == "compiled" and job.model.endswith(".gguf"):
        from vllm_gguf_plugin import ops

        if not ops._cuda_kernel_available("ggml_moe_a8"):
            raise RuntimeError("the plugin's compiled kernels are not available")


def main() -> None:
    """Run the job in the file that the command line names."""
    import numpy as np

    path = Path(sys.argv[1])
    given = json.loads(path.read_text())
    job, text = GgufJob(**given["job"]), given["text"]
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        HF_HUB_OFFLINE="1",
        # The compiled kernels dequantize in float16, those in Triton in float32.
        VLLM_GGUF_USE_CUDA="1" if job.kernels == "compiled" else "0",
    )
    if job.ranks > 1:
        os.environ.update(WITHOUT_MULTICAST)
    choose_kernels(job)
    from engine_worker import score
    from vllm import LLM

    started = time.monotonic()
    engine = LLM(**engine_arguments(job))
    if job.ranks > 1:
        from gguf_ranks import require_nccl

        require_nccl(engine)
    figures: dict[str, Any] = {"job": asdict(job), "start_seconds": time.monotonic() - started}
    arrays = {"prefill": np.asarray(score(engine, text), np.float32)}
    if not np.isfinite(arrays["prefill"]).all():
        raise RuntimeError("log-probabilities are not finite")
    if job.drafted:
        figures["continued"] = continued(engine, text)
    if job.timed:
        figures["decode"] = {str(batch): timed(engine, batch) for batch in TIMED_BATCHES}
    stored: dict[str, Any] = arrays
    with path.with_suffix(".npz").open("wb") as file:
        np.savez_compressed(file, **stored)
    path.with_suffix(".result.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
