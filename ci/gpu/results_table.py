"""Write results/README.md: the reports in results/ as tables.

python ci/gpu/results_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import traffic

RESULTS = Path(__file__).resolve().parent / "results"
INDEXER_REPORT = "indexer"
REPORTS = (
    *("kernel-check", "sanitizer", "kernel-bench", "engine"),
    *("logits-check", "logits-bench", INDEXER_REPORT),
)
COMPARED = ("fp8", "drafts", "wide", "wide-drafts", "groups", "dcp", "dcp-merge", "pipeline")
EXAMINED = ("sync", "allocations")
LATER = {"dcp-merge"}  # no host has given it yet: tests of reports do without it alone
SOAK, PLANTED = "soak", "planted-soak"
GGUF = ("gguf-two-gpus", "gguf-two-gpus-language", "gguf-wide-text", "gguf-wide")
GGUF_STEPS = ("twin", "language", "wide-text")
KERNELS = ("triton_mla_sparse", "page_size_1_reuse", "flashmla_bf16")
OURS_FP8, NATIVE_FP8 = "triton_mla_sparse_fp8", "flashmla_fp8"


def report(name: str) -> dict[str, Any]:
    """Read one report."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def there(names: tuple[str, ...]) -> list[str]:
    """Return the reports that a GPU host has given so far."""
    return [name for name in names if (RESULTS / f"{name}.json").exists()]


def segments() -> list[str]:
    """Return the reports of the soak's segments, in their order."""
    names = (path.stem for path in RESULTS.glob(f"{SOAK}-*.json"))
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def provenance() -> list[str]:
    """Return the table of what each report measured."""
    lines = ["| report | result | wheel | wheel sha256 | commit | stack id |", "|---|---|---|---|---|---|"]
    for name in (*REPORTS, *there((*COMPARED, *EXAMINED, *GGUF, SOAK, PLANTED)), *segments()):
        document = report(name)
        files = document["wheel_files"]
        wheel, commit, stack = files["wheel"], files["commit"][:12], files["stack_id"][:12]
        if plugin := document.get("plugin"):
            stack += f", plugin {plugin['stack_id'][:12]}"
        cells = (f"{name}.json", document["result"], wheel["name"].split("-")[1], wheel["sha256"][:12])
        lines.append(f"| {' | '.join((*cells, commit, stack))} |")
    return lines


def speeds() -> list[str]:
    """Return the table of the kernels' times."""
    lines = [
        "| heads | rows | ours, us | page-size-1 reuse, us | reuse / ours | FlashMLA bf16, us "
        "| FlashMLA / ours |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for point in report("kernel-bench")["points"]:
        ours, reuse, flashmla = (point["us"][kernel] for kernel in KERNELS)
        times = f"{ours:.1f} | {reuse:.1f} | {reuse / ours:.2f} | {flashmla:.1f} | {flashmla / ours:.2f}"
        lines.append(f"| {point['heads']} | {point['tokens']} | {times} |")
    return lines


def fp8_speeds() -> list[str]:
    """Return the table of the kernels' times with the fp8_ds_mla cache, if they were measured."""
    points = [point for point in report("kernel-bench")["points"] if OURS_FP8 in point["us"]]
    if not points:
        return []
    lines = [
        "",
        "The same with the fp8_ds_mla cache, beside FlashMLA's sparse fp8 kernel.",
        "",
        "| heads | rows | ours, us | ours bf16 / ours | FlashMLA fp8, us | FlashMLA / ours |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for point in points:
        ours, bf16, native = (point["us"].get(name) for name in (OURS_FP8, KERNELS[0], NATIVE_FP8))
        flashmla = f"{native:.1f} | {native / ours:.2f}" if native is not None else "not there |"
        lines.append(
            f"| {point['heads']} | {point['tokens']} | {ours:.1f} | {bf16 / ours:.2f} | {flashmla} |"
        )
    return lines


def tiles() -> list[str]:
    """Return the tables of the chosen configurations' times, of the sweeps that tell them."""
    lines: list[str] = []
    for path in sorted((RESULTS / "tune").glob("*.json")):
        document = json.loads(path.read_text())
        chosen = {(one["heads"], one["tokens"]): one["ratio"] for one in document.get("chosen", [])}
        if not chosen:
            continue
        heads, tokens = (sorted({point[axis] for point in chosen}) for axis in (0, 1))
        lines += [
            "",
            f"Tiles, {path.stem}: the chosen configuration's time over the best one's, by heads and rows.",
            "",
            f"| heads | {' | '.join(map(str, tokens))} |",
            f"|--:|{'--:|' * len(tokens)}",
        ]
        for count in heads:
            ratios = (chosen.get((count, rows)) for rows in tokens)
            cells = ("not timed" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {count} | {' | '.join(cells)} |")
    return lines


def logits() -> list[str]:
    """Return what the checks of the indexer's logits gave, and the table of times."""
    check, bench = report("logits-check"), report("logits-bench")
    worst = max(shape["difference"] for shape in check["deep_gemm"])
    other = sum(shape["differing_choices"] for shape in check["deep_gemm"])
    lines = [
        f"Indexer logits, one {bench['gpu']}, torch {bench['torch']}, Triton {bench['triton']}, DeepGEMM "
        f"{bench['deep_gemm']}; medians of graph replays in one run.",
        f"{check['shapes']} random shapes against float64: {len(check['problems'])} problems. Ours are off",
        f"DeepGEMM's logits by at most {worst:.1e} of the largest; {other} other choices in the top 2048.",
        "",
        "| shape | ours, us | DeepGEMM, us | ours / DeepGEMM | goal |",
        "|---|--:|--:|--:|--:|",
    ]
    for point in bench["points"]:
        ours, native = point["us"]["triton_mqa_logits"], point["us"]["deep_gemm"]
        ratio, goal = f"{point['ratio']:.2f}", f"{point['goal']:.1f}"
        lines.append(f"| {point['shape']} | {ours:.1f} | {native:.1f} | {ratio} | {goal} |")
    return lines


def indexer() -> list[str]:
    """Return the table of the indexer's differences."""
    lines = [
        "| mode | prefill: between the native backends | Triton's indexer to DeepGEMM's | ratio "
        "| decode: between the native ones | Triton's to DeepGEMM's | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report(INDEXER_REPORT)["modes"]:
        parts = [row["differences"][part] for part in ("prefill", "decode")]
        cells = [f"{p['native']:.2e} | {p['ours']:.2e} | {p['ours'] / p['native']:.2f}" for p in parts]
        lines.append(f"| {row['mode']} | {' | '.join(cells)} |")
    return lines


def failures(row: dict[str, Any]) -> str:
    """Return what the engines of a mode died of, as the text of one cell."""
    text = "; ".join(f"{engine}: {error}" for engine, error in row["errors"].items())
    return " ".join(text.replace("|", "/").split())


def compared() -> list[str]:
    """Return the tables of the proofs of the complete backend, as far as they are there."""
    lines: list[str] = []
    if there(COMPARED):
        lines += [
            "",
            "Mean absolute differences of log-probabilities between two native engines, and the largest of",
            "ours in units of them; the bound is 1.5. Ours are differences from native engines, with as many",
            "drafts. Of dcp, dcp-merge and pipeline they are differences from our own engine without context",
            "parallelism and stages: there the native engines give the bound alone.",
            "",
            "| proof | mode | prefill: natives | ratio | decode: natives | ratio |",
            "|---|---|--:|--:|--:|--:|",
        ]
    for name in there(COMPARED):
        for row in report(name)["modes"]:
            if "errors" in row:
                lines.append(f"| {name} | {row['mode']} | {failures(row)} | | | |")
                continue
            parts = [row["differences"][part] for part in ("prefill", "decode")]
            cells = [f"{p['native']:.2e} | {max(p['ours'].values()) / p['native']:.2f}" for p in parts]
            lines.append(f"| {name} | {row['mode']} | {' | '.join(cells)} |")
    if there(EXAMINED):
        lines += ["", "| proof | mode | |", "|---|---|---|"]
    for name in there(EXAMINED):
        for row in report(name)["modes"]:
            lines.append(f"| {name} | {row['mode']} | {failures(row) if 'errors' in row else row['says']} |")
    return lines


def soaked() -> list[str]:
    """Return what the soak gave: all of it, or the segments that have run."""
    whole = there((SOAK,))
    found = [report(name) for name in whole or segments()]
    if not found:
        return []
    numbers = ("requests", "tokens", "cancellations", "preemptions", "replays", "logprobs_checked")
    counts = ", ".join(f"{sum(r[name] for r in found):,} {name.replace('_', ' ')}" for name in numbers)
    findings = sum(len(r[name]) for r in found for name in ("not_finite", "differing", "hangs"))
    seconds = sum(r["seconds"] for r in found)
    count = len(found[0]["segments"]) if whole else len(found)
    engines = found[0]["engines"] if whole else [r["engine"] for r in found]
    return [
        "",
        f"{'Soak' if whole else 'Soak, not whole yet'}: {seconds:.0f} s of {count} segments, {counts};",
        *soak_shares(found),
        f"{findings} findings (NaN, other answers, hangs). Engines: {', '.join(engines)}.",
    ]


def soak_shares(found: list[dict[str, Any]]) -> list[str]:
    """Return how long a soak took and how much of it was compared."""
    names = (*traffic.SUMS, "traffic_seconds")
    total = {name: sum(r[name] for r in found) for name in names}
    [clock] = [r["clock_seconds"] for r in found if "clock_seconds" in r] or [
        traffic.union((r["began"], r["ended"]) for r in found)
    ]
    replayed, compared = (
        f"{total[part] / total[whole]:.1%} of {total[whole]:,}" if total[whole] else "none"
        for part, whole in (("replays", "recorded"), ("tokens_compared", "replayed_tokens"))
    )
    prompts = f"{total['prompt_logprobs_compared']:,} log-probabilities of prompts"
    parted = f"{total['parted']:,} parted at a near tie ({total['parted_at_once']:,} at the first token)"
    parted += f", whose two tokens' distance changed by {max(r['widest_swing'] for r in found):.2f} at most"
    return [
        "the seconds are those of all engines together, within",
        f"{clock:.0f} s by the clock; new requests arrived for {total['traffic_seconds']:.0f} s.",
        f"Of the recorded answers {replayed} were asked again while others arrived; of their tokens",
        f"{compared} were compared, with {prompts}; {parted}.",
        *planted(),
    ]


def planted() -> list[str]:
    """Return what a soak with damaged steps found."""
    return [
        f"With damaged steps {one['found']:,} of {one['hit']:,} answers under way then were found to differ."
        for one in map(report, there((PLANTED,)))
    ]


def gguf() -> list[str]:
    """Return the tables of the GGUF proofs, as far as they are there."""
    found = [report(name) for name in there(GGUF)]
    steps = [(step, one[step]) for one in found for step in GGUF_STEPS if step in one]
    lines: list[str] = []
    if steps:
        lines += [
            "",
            "GGUF: mean absolute differences of log-probabilities, near (all keys seen) and far (the indexer",
            "selects). `../gguf_proof.py` says what is compared and how much may differ.",
            "",
            "| step | difference | near | far |",
            "|---|---|--:|--:|",
        ]
    for step, document in steps:
        for name, size in document["differences"].items():
            lines.append(f"| {step} | {name} | {size['near']:.2e} | {size['far']:.2e} |")
    for step, document in steps:
        if drafts := document.get("drafts"):
            counts = (f"{name} {kept['accepted']} of {kept['drafted']}" for name, kept in drafts.items())
            lines += ["", f"Accepted drafts ({step}): {', '.join(counts)}."]
    return lines + gguf_products(found) + gguf_speeds(found)


def gguf_products(found: list[dict[str, Any]]) -> list[str]:
    """Return how far the GGUF kernels' products are off."""
    lines: list[str] = []
    for products in (document["products"]["products"] for document in found if "products" in document):
        worst = (
            f"{kernels} {max(one['error'] for one in shapes.values()):.2%} ({len(shapes)} shapes)"
            for kernels, shapes in products.items()
        )
        lines += ["", f"Products and those of decoded weights differ, of a row's norm: {', '.join(worst)}."]
    return lines


def gguf_speeds(found: list[dict[str, Any]]) -> list[str]:
    """Return the table of a wide file's speed."""
    lines: list[str] = []
    for engines in (document["wide"]["engines"] for document in found if "wide" in document):
        lines += [
            "",
            "| widths of GLM-5 | requests | prefill of 512 tokens each, s | decode, tokens / s |",
            "|---|--:|--:|--:|",
        ]
        for engine, figures in engines.items():
            for requests, pace in figures["decode"].items():
                times = f"{pace['prefill_seconds']:.2f} | {pace['tokens_per_second']:.0f}"
                lines.append(f"| {engine} | {requests} | {times} |")
    return lines


def render() -> str:
    """Return the whole text."""
    bench = report("kernel-bench")
    lines = [
        "# What a GPU host said",
        "",
        "Written by `ci/gpu/results_table.py` out of the reports beside it; `../README.md` says how they",
        "came about.",
        "",
        *provenance(),
        "",
        f"Sparse MLA, bf16, top-k 2048, one {bench['gpu']}, torch {bench['torch']}, Triton "
        f"{bench['triton']}; medians of graph replays in one run.",
        "",
        *speeds(),
        *fp8_speeds(),
        *tiles(),
        "",
        *logits(),
        "",
        "The indexer: mean absolute differences of log-probabilities in one run, prompts to 32,000 tokens;",
        "the bound of the ratio is 1.5. In the modes that end in hidden the engine with Triton's has no CUDA",
        "toolkit.",
        "",
        *indexer(),
        *compared(),
        *soaked(),
        *gguf(),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the file, or with --check say whether it is what the reports give."""
    path = RESULTS / "README.md"
    if "--check" in sys.argv[1:]:
        return 0 if path.read_text() == render() else 1
    path.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
