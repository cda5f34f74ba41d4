"""The installed vllm-gguf-plugin gives quantized GGUF tensors the names of vLLM's parameters.

Run where the built plugin wheel is installed, so that this also shows that the wheel holds the patch
``gguf-weight-name``. Every file that is read here is a real GGUF file written by the test; every expected
name is written out or put together from its parts, never computed by the code under test.
"""

import hashlib
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from hypothesis import example, given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    # vLLM imports torch's inductor, which uses a deprecated function of torch itself.
    warnings.filterwarnings("ignore", r"`torch\.jit\.script_method` is deprecated", DeprecationWarning)
    import torch
    from vllm_gguf_plugin import weight_utils
    from vllm_gguf_plugin.weights_adapter.diffusion import base as diffusion_base

Summary = tuple[str, torch.dtype | str, str | int | float]
Iterate = Callable[[Path], Iterable[tuple[str, torch.Tensor]]]

PLAIN_DTYPES = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}
VALUES = 256  # in a row: one block of a K-quant, eight blocks of Q8_0


class Case(NamedTuple):
    """A tensor of a DSA model: its name in the file, its type, its name in vLLM and in the loaded data."""

    gguf_name: str
    type: GGMLType
    hf_name: str
    data_name: str
    type_name: str | None = None


def quantized(gguf_name: str, ggml_type: GGMLType, module: str, stem: str = ".") -> Case:
    """Return the case of a quantized weight; ``stem`` stands between the module and "weight"."""
    hf_name = f"{module}{stem}weight"
    return Case(gguf_name, ggml_type, hf_name, f"{module}{stem}qweight", f"{module}{stem}qweight_type")


def plain(gguf_name: str, ggml_type: GGMLType, hf_name: str) -> Case:
    """Return the case of a tensor that is not quantized and therefore keeps its name."""
    return Case(gguf_name, ggml_type, hf_name, hf_name)


ATTENTION = "model.layers.0.self_attn"
CASES = [
    quantized("token_embd.weight", GGMLType.Q8_0, "model.embed_tokens"),
    quantized("blk.0.indexer.proj.weight", GGMLType.Q8_0, f"{ATTENTION}.indexer.weights_proj"),
    quantized("blk.0.indexer.attn_k.weight", GGMLType.Q8_0, f"{ATTENTION}.indexer.wk"),
    quantized("blk.0.indexer.attn_q_b.weight", GGMLType.Q4_K, f"{ATTENTION}.indexer.wq_b"),
    quantized("blk.0.ffn_down_exps.weight", GGMLType.Q8_0, "model.layers.0.mlp.experts", ".w2_"),
    quantized("blk.0.ffn_gate_up_exps.weight", GGMLType.Q4_K, "model.layers.0.mlp.experts", ".w13_"),
    quantized("blk.0.mix.weight", GGMLType.Q4_K, "model.layers.0.input_mix_weight_down"),
    plain("blk.0.indexer.k_norm.bias", GGMLType.F32, f"{ATTENTION}.indexer.k_norm.bias"),
    plain("blk.1.indexer.proj.weight", GGMLType.F32, "model.layers.1.self_attn.indexer.weights_proj.weight"),
    plain("blk.2.indexer.proj.weight", GGMLType.F16, "model.layers.2.self_attn.indexer.weights_proj.weight"),
    plain("blk.3.indexer.proj.weight", GGMLType.BF16, "model.layers.3.self_attn.indexer.weights_proj.weight"),
]

ITERATORS: list[Any] = [
    pytest.param(lambda path: weight_utils.gguf_quant_weights_iterator(path, None), id="model"),
    pytest.param(lambda path: diffusion_base.gguf_quant_weights_iterator(path), id="diffusion"),
]

# Most names made of these hold several "weight"s; "weigh" and "t" may make one more.
PLAIN_PIECES = ["weigh", "w", "t", "q", ".", "_", "0", "é"]
PIECES = ["weight", "weights_proj", "_weight_", "qweight", "qweight_type", *PLAIN_PIECES]
ANY_NAME = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
NAME_WITHOUT_WEIGHT = (
    st.lists(st.sampled_from(PLAIN_PIECES), max_size=6).map("".join).filter(lambda name: "weight" not in name)
)
NO_DEADLINE = settings(deadline=None)  # a busy machine is no failure


def payload(ggml_type: GGMLType, seed: int) -> np.ndarray[Any, Any]:
    """Return random data of 3 rows as the file stores it: bytes, or floats for F32 and F16."""
    rng = np.random.default_rng(seed)
    if ggml_type is GGMLType.Q4_K:  # gguf-py decodes it only; any bytes are a valid block
        block, size = gguf.GGML_QUANT_SIZES[ggml_type]
        return rng.integers(256, size=(3, VALUES // block * size), dtype=np.uint8)
    data: np.ndarray[Any, Any] = gguf.quantize(rng.standard_normal((3, VALUES), dtype=np.float32), ggml_type)
    return data if ggml_type in {GGMLType.F32, GGMLType.F16} else data.view(np.uint8)


def write_gguf(path: Path, types: Mapping[str, GGMLType]) -> dict[str, bytes]:
    """Write a tensor of each name and type to a ``glm-dsa`` file and return the bytes of each."""
    writer = gguf.GGUFWriter(path, "glm-dsa")
    written: dict[str, bytes] = {}
    for seed, (name, ggml_type) in enumerate(types.items()):
        data = payload(ggml_type, seed)
        writer.add_tensor(name, data, raw_dtype=ggml_type)
        written[name] = data.tobytes()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def fingerprint(data: bytes) -> str:
    """Return a short stand-in for the bytes of a tensor, so that a failed comparison can be read."""
    return hashlib.sha256(data).hexdigest()


def summarize(loaded: Iterable[tuple[str, torch.Tensor]]) -> list[Summary]:
    """Return name, dtype and content of each tensor; of a scalar, which is a type, name and number."""
    return [
        (name, "type", tensor.item())
        if tensor.ndim == 0
        else (name, tensor.dtype, fingerprint(tensor.view(torch.uint8).numpy().tobytes()))
        for name, tensor in loaded
    ]


def expected_types(cases: Iterable[Case]) -> list[Summary]:
    """Return the summaries of the types that quantized tensors must be loaded with."""
    return [(case.type_name, "type", int(case.type)) for case in cases if case.type_name is not None]


def expected_data(cases: Iterable[Case], written: Mapping[str, bytes]) -> list[Summary]:
    """Return the summaries of the data that must be loaded for the bytes that were written."""
    return [
        (case.data_name, PLAIN_DTYPES.get(case.type, torch.uint8), fingerprint(written[case.gguf_name]))
        for case in cases
    ]


def test_code_under_test_is_the_installed_wheel() -> None:
    installed = distribution("vllm-gguf-plugin")
    for module in (weight_utils, diffusion_base):
        relative = module.__name__.replace(".", "/") + ".py"
        assert relative in {str(file) for file in installed.files or []}
        assert Path(module.__file__ or "").samefile(str(installed.locate_file(relative)))


@NO_DEADLINE
@given(prefix=ANY_NAME, suffix=NAME_WITHOUT_WEIGHT)
@example(prefix="model.layers.0.self_attn.indexer.weights_proj.", suffix="")
@example(prefix="model.layers.0.mlp.experts.w13_", suffix="")
@example(prefix="input_mix_weight_down.", suffix="")
@example(prefix="", suffix="")
def test_last_weight_is_renamed_and_nothing_else(prefix: str, suffix: str) -> None:
    renamed = weight_utils.get_gguf_quant_param_names(f"{prefix}weight{suffix}")
    assert renamed == (f"{prefix}qweight{suffix}", f"{prefix}qweight_type{suffix}")


@NO_DEADLINE
@given(prefix=ANY_NAME, suffix=NAME_WITHOUT_WEIGHT)
def test_exactly_one_segment_of_the_name_changes(prefix: str, suffix: str) -> None:
    name = f"{prefix}weight{suffix}"
    before = name.split(".")
    for renamed in weight_utils.get_gguf_quant_param_names(name):
        after = renamed.split(".")
        changed = [old for old, new in zip(before, after, strict=True) if old != new]
        last = [segment for segment in before if "weight" in segment][-1]
        assert changed == [last]


@NO_DEADLINE
@given(first=ANY_NAME, second=ANY_NAME)
def test_two_weights_never_share_a_parameter(first: str, second: str) -> None:
    one, two = (weight_utils.get_gguf_quant_param_names(f"{name}weight") for name in (first, second))
    assert (one[0] == two[0]) == (one[1] == two[1]) == (first == second)


@NO_DEADLINE
@given(name=NAME_WITHOUT_WEIGHT)
def test_name_without_weight_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        weight_utils.get_gguf_quant_param_names(name)


def test_model_iterator_gives_the_names_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "glm.gguf"
    written = write_gguf(path, {case.gguf_name: case.type for case in CASES})

    to_hf = {case.gguf_name: case.hf_name for case in CASES}
    loaded = summarize(weight_utils.gguf_quant_weights_iterator_multi([path], to_hf))

    assert loaded == [
        summary for case in CASES for summary in (*expected_types([case]), *expected_data([case], written))
    ]


def test_diffusion_iterator_gives_types_first(tmp_path: Path) -> None:
    path = tmp_path / "diffusion.gguf"
    cases = [case._replace(gguf_name=case.hf_name) for case in CASES]
    written = write_gguf(path, {case.gguf_name: case.type for case in cases})

    loaded = summarize(diffusion_base.gguf_quant_weights_iterator(path))

    assert loaded == expected_types(cases) + expected_data(cases, written)


@settings(NO_DEADLINE, max_examples=40)
@given(
    tensors=st.dictionaries(
        st.tuples(ANY_NAME, NAME_WITHOUT_WEIGHT),
        st.sampled_from([GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.F32, GGMLType.BF16]),
        min_size=1,
        max_size=5,
    )
)
@pytest.mark.parametrize("iterate", ITERATORS)
def test_iterators_rename_any_file(iterate: Iterate, tensors: dict[tuple[str, str], GGMLType]) -> None:
    cases = [
        plain(f"{prefix}weight{suffix}", ggml_type, f"{prefix}weight{suffix}")
        if ggml_type in PLAIN_DTYPES
        else Case(
            gguf_name=f"{prefix}weight{suffix}",
            type=ggml_type,
            hf_name=f"{prefix}weight{suffix}",
            data_name=f"{prefix}qweight{suffix}",
            type_name=f"{prefix}qweight_type{suffix}",
        )
        for (prefix, suffix), ggml_type in tensors.items()
    ]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "any.gguf")
        written = write_gguf(path, {case.gguf_name: case.type for case in cases})
        loaded = summarize(iterate(path))

    assert Counter(loaded) == Counter(expected_types(cases) + expected_data(cases, written))


@pytest.mark.parametrize("iterate", ITERATORS)
def test_iterators_reject_a_quantized_tensor_without_weight(tmp_path: Path, iterate: Iterate) -> None:
    path = tmp_path / "nameless.gguf"
    write_gguf(path, {"blk.0.norm.bias": GGMLType.F32, "blk.7.attn_sinks": GGMLType.Q8_0})

    with pytest.raises(ValueError, match=r"'blk\.7\.attn_sinks'"):
        list(iterate(path))


def test_error_of_the_model_iterator_names_the_mapped_tensor(tmp_path: Path) -> None:
    path = tmp_path / "mapped.gguf"
    write_gguf(path, {"blk.0.attn_sinks.weight": GGMLType.Q8_0})

    to_hf = {"blk.0.attn_sinks.weight": "model.layers.0.self_attn.sinks"}
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.sinks'"):
        list(weight_utils.gguf_quant_weights_iterator(path, to_hf))
