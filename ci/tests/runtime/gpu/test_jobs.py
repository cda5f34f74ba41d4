"""Every engine of the proofs has a name of its own, and arguments that vLLM takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_proof
import pytest
import small_models
import soak
import torch
from dcp_merge import WITHOUT_CUTEDSL
from engine_jobs import LIMITS, TEXTS, Job, engine_arguments, environment, parallelism
from engine_tasks import TASKS
from results_table import COMPARED, EXAMINED, LATER

GPU = Path(engine_proof.__file__).parent
PROOFS = engine_proof.PROOFS


def all_jobs_apart(name: str) -> tuple[list[Job], list[Job]]:
    proof = PROOFS[name]
    first, others = proof.make_jobs(list(proof.modes(proof.models)))
    assert not set(first) & set(others)
    return first, others


def all_jobs(name: str) -> list[Job]:
    first, others = all_jobs_apart(name)
    return [*first, *others]


@pytest.mark.parametrize("name", PROOFS)
def test_jobs_have_names_of_their_own_and_a_task(name: str) -> None:
    jobs = all_jobs(name)
    assert len({job.name for job in jobs}) == len(jobs) > 0
    modes = list(PROOFS[name].modes(PROOFS[name].models))
    assert set(modes) <= set(jobs)
    assert len({mode.mode for mode in modes}) == len(modes)
    assert {job.task for job in jobs} <= LIMITS.keys() & TASKS.keys()
    assert max(job.ranks for job in jobs) == PROOFS[name].ranks
    assert set(PROOFS[name].texts) <= set(TEXTS)


@pytest.mark.parametrize(("proof", "report"), [("attention", "engine"), ("indexer", "indexer")])
def test_modes_are_called_as_in_the_reports(proof: str, report: str) -> None:
    document: dict[str, Any] = json.loads((GPU / "results" / f"{report}.json").read_text())
    parts = document["models"].values() if "models" in document else [document]
    known = {row["mode"] for part in parts for row in part["modes"]}
    assert known <= {mode.mode for mode in PROOFS[proof].modes(PROOFS[proof].models)}
    assert document["jobs"].keys() <= {job.name for job in all_jobs(proof)}


def kept(names: tuple[str, ...]) -> list[str]:
    """Return the reports that are there, or that must be."""
    return [name for name in names if name not in LATER or (GPU / "results" / f"{name}.json").exists()]


@pytest.mark.parametrize("proof", kept((*COMPARED, *EXAMINED)))
def test_reports_of_the_complete_backend_have_all_modes(proof: str) -> None:
    modes = {mode.mode for mode in PROOFS[proof].modes(PROOFS[proof].models)}
    document = json.loads((GPU / "results" / f"{proof}.json").read_text())
    assert {row["mode"] for row in document["modes"]} == modes
    assert document["jobs"].keys() == {job.name for job in all_jobs(proof)}


@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_runs_its_own_modes_and_refuses_to_run_none(
    proof: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [mode.mode for mode in engine_proof.choose(PROOFS[proof], None)]
    others = {mode.mode for other in PROOFS.values() for mode in engine_proof.choose(other, None)} - set(own)
    words = ["--proof", proof, "--out", str(tmp_path / "out"), "--work", str(tmp_path), "--modes"]
    both = engine_proof.parse_arguments([*words, *others, own[-1]])
    assert [mode.mode for mode in engine_proof.choose(PROOFS[proof], both.modes)] == [own[-1]]
    monkeypatch.setattr(sys, "argv", ["engine_proof.py", *words, *others])
    with pytest.raises(SystemExit, match="2"):
        engine_proof.main()
    assert f"--proof {proof} has none of these modes; it has {own[0]} " in capsys.readouterr().err


def test_every_text_fits_the_engines_that_read_it() -> None:
    needs = {
        "attention": "text", "drafts": "far_text", "wide": "wide_text", "long": "long_text",
        "wide-drafts": "wide_drafts_text",
    }  # fmt: skip
    for task, text in needs.items():
        lengths, continued, _ = TEXTS[text]
        assert max(lengths) + continued <= LIMITS[task].model_len
        assert len(set(lengths)) == len(lengths)
    assert len(TEXTS["wide_text"][0]) <= LIMITS["wide"].requests
    assert len(TEXTS["wide_drafts_text"][0]) <= LIMITS["wide-drafts"].requests


def test_many_requests_with_drafts_fill_graphs_of_more_than_64_rows() -> None:
    jobs = all_jobs("wide-drafts")
    assert {(job.draft, job.runner, job.graphs) for job in jobs} == {(5, 2, True)}
    lengths, limits = TEXTS["wide_drafts_text"][0], LIMITS["wide-drafts"]
    assert len(lengths) * 6 > 64
    for job in jobs:
        sizes = engine_arguments(job, Path())["compilation_config"]["cudagraph_capture_sizes"]
        assert max(sizes) >= limits.requests * 6
    # Each prompt alone takes no more than a step or two, and each answer more than 20: all overlap.
    assert sum(lengths) / limits.tokens < TEXTS["wide_drafts_text"][1] / 6


def test_pytorch_merges_where_the_mode_says_so() -> None:
    merging = {job for name in PROOFS for job in all_jobs(name) if job.merge}
    assert {job.mode for job in merging} == {
        f"{model}-v2-graphs-auto-tp2-dcp2-torchmerge" for model in ("glm5", "glm53flash")
    }
    for job in all_jobs("dcp-merge"):
        assert (WITHOUT_CUTEDSL in environment(job)) == (job in merging)
    # But for that they are modes of dcp, and compared as there.
    apart = {replace(job, merge=None) for job in all_jobs("dcp-merge")}
    assert apart < set(all_jobs("dcp"))


@pytest.mark.parametrize("name", ["wide-drafts", "dcp-merge"])
def test_all_engines_of_a_small_proof_start_together(name: str) -> None:
    proof = PROOFS[name]
    for model in proof.models:
        first, others = proof.make_jobs(list(proof.modes([model])))
        assert len(first) <= proof.workers // len(proof.models)
        assert not others


def test_engines_on_several_gpus_do_without_multicast() -> None:
    for job in all_jobs("dcp"):
        variables = environment(job)
        assert (variables.get("NCCL_NVLS_ENABLE") == "0") == (job.ranks > 1)
        arguments = engine_arguments(job, Path())
        assert arguments.get("tensor_parallel_size", 1) == job.tensor
        assert ("worker_extension_cls" in arguments) == (job.ranks > 1)


def test_a_model_that_shares_its_topk_has_no_other_indexers() -> None:
    model = small_models.MODELS["glm52"]
    weights, _ = small_models.make_weights(small_models.MODELS["glm52"], 7)
    having = {int(name.split(".")[2]) for name in weights if "indexer.wq_b" in name}
    full = [n for n, kind in enumerate(model.layers) if kind == "mla"]
    assert having == {*full, len(model.layers)}
    settings = small_models.config(model)
    freq, offset = settings["index_topk_freq"], settings["index_skip_topk_offset"]
    assert full == [n for n in range(len(model.layers)) if max(n - offset + 1, 0) % freq == 0]
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_vllm_takes_the_arguments_of_every_engine(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("engine_configs.py")
    paths = [str(GPU.parent), str(GPU), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["refused"] == {}
    assert report["engines"] >= len(soak.ENGINES)


@pytest.mark.parametrize("name", ["dcp", "pipeline"])
def test_the_first_engines_on_two_gpus_all_start_at_once_and_then_all_others(name: str) -> None:
    proof = PROOFS[name]
    for model in proof.models:
        first, others = proof.make_jobs(list(proof.modes([model])))
        assert max(len(first), len(others)) <= proof.workers // len(proof.models)
        assert {job.context for job in first} == {1}  # the merge of their top-k may still be on trial


def test_ranks_have_whole_pools() -> None:
    proof = PROOFS["dcp"]
    sizes = {
        job.model: parallelism(job).get("cp_kv_cache_interleave_size", 1) for job in proof.modes(proof.models)
    }
    assert sizes == {"glm5": 1, "glm53flash": 4}


def test_one_engine_of_each_kind_comes_first() -> None:
    first, others = all_jobs_apart("dcp")
    assert len({job.kind for job in first}) == len(first)
    assert {job.kind for job in others} <= {job.kind for job in first}
    assert {job.ranks for job in first} == {1, 2}
