"""The table of the reports takes up those of the complete backend once they are there."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import kernel_bench
import results_table
import traffic

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FILES = {
    "wheel": {"sha256": "a" * 64, "name": "vllm-0.33.0+bw.0-x"},
    "commit": "c" * 40,
    "stack_id": "b" * 64,
}
PART = {"native": 1e-3, "ours": {"x": 9e-4, "y": 1.1e-3}}


def test_new_reports_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in results_table.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    before = results_table.render()
    common: dict[str, Any] = {"wheel_files": FILES, "result": "passed"}
    mode = {"mode": "glm5-v2-graphs-auto-fp8_ds_mla", "differences": {"prefill": PART, "decode": PART}}
    dead = {"mode": "n", "errors": {"e": "exit\nstatus | 1"}, "passed": False}
    (tmp_path / "fp8.json").write_text(json.dumps(common | {"modes": [mode, dead]}))
    clean = {"mode": "m", "says": "ours clean"}
    (tmp_path / "sync.json").write_text(json.dumps(common | {"modes": [clean, dead]}))
    soak: dict[str, Any] = dict.fromkeys(traffic.SUMS, 1234) | {name: [] for name in traffic.LISTS}
    soak |= {"segments": [0, 1], "engines": ["e"], "widest_swing": 0.1} | dict.fromkeys(
        (*traffic.TIMES, "clock_seconds"), 912.4
    )
    (tmp_path / "soak.json").write_text(json.dumps(common | soak))
    plugin = {"plugin": {"stack_id": "d" * 64}}
    (tmp_path / "gguf-two-gpus-language.json").write_text(json.dumps(common | plugin))
    added = [line for line in results_table.render().splitlines() if line not in before.splitlines()]
    assert "| fp8 | glm5-v2-graphs-auto-fp8_ds_mla | 1.00e-03 | 1.10 | 1.00e-03 | 1.10 |" in added
    assert "| fp8 | n | e: exit status / 1 | | | |" in added
    assert "| sync | n | e: exit status / 1 |" in added
    assert "| sync | m | ours clean |" in added
    assert any(line.startswith("Soak: 912 s of 2 segments, 1,234 requests") for line in added)
    assert any(line.startswith("| soak.json | passed |") for line in added)
    [line] = [line for line in added if line.startswith("| gguf-two-gpus-language.json |")]
    assert line.endswith(f"| {'b' * 12}, plugin {'d' * 12} |")


def test_segments_of_a_soak_count_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    assert results_table.soaked() == []
    counted: dict[str, Any] = {name: [] for name in traffic.LISTS} | dict.fromkeys(traffic.SUMS, 1000)
    counted |= {"replays": 900, "tokens_compared": 750, "parted": 20}
    counted |= {"seconds": 400.2, "traffic_seconds": 390.0}
    counted |= {"parted_at_once": 3, "widest_swing": 0.0625}
    for number, began in ((10, 50.0), (9, 250.0)):
        report = counted | {"engine": f"e{number}", "began": began, "ended": began + 400.0}
        (tmp_path / f"soak-{number}.json").write_text(json.dumps(report))
    assert results_table.segments() == ["soak-9", "soak-10"]
    _, first, *shares, last = results_table.soaked()
    assert first.startswith("Soak, not whole yet: 800 s of 2 segments, 2,000 requests")
    assert last == "0 findings (NaN, other answers, hangs). Engines: e9, e10."
    assert shares == [
        "the seconds are those of all engines together, within",
        "600 s by the clock; new requests arrived for 780 s.",
        "Of the recorded answers 90.0% of 2,000 were asked again while others arrived; of their tokens",
        "75.0% of 2,000 were compared, with 2,000 log-probabilities of prompts; "
        "40 parted at a near tie (6 at the first token), whose two tokens' distance changed by 0.06 at most.",
    ]
    (tmp_path / "planted-soak.json").write_text(json.dumps({"hit": 1200, "found": 1100}))
    damaged = "With damaged steps 1,100 of 1,200 answers under way then were found to differ."
    assert results_table.soaked()[-2] == damaged
    whole = counted | {"segments": [0, 1], "engines": ["e"], "clock_seconds": 612.0}
    (tmp_path / "soak.json").write_text(json.dumps(whole))
    assert results_table.soaked()[1].startswith("Soak: 400 s of 2 segments, 1,000 requests")
    assert results_table.soaked()[3] == "612 s by the clock; new requests arrived for 390 s."


def test_times_with_an_fp8_cache_have_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in results_table.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    path = tmp_path / "kernel-bench.json"
    bench = json.loads(path.read_text())
    for point in bench["points"]:
        for name in (kernel_bench.OURS_FP8, kernel_bench.NATIVE_FP8):
            point["us"].pop(name, None)
    path.write_text(json.dumps(bench))
    assert results_table.fp8_speeds() == []
    first, second = bench["points"][:2]
    first["us"] |= {kernel_bench.OURS: 12.0, kernel_bench.OURS_FP8: 10.0, kernel_bench.NATIVE_FP8: 25.0}
    second["us"] |= {kernel_bench.OURS: 12.0, kernel_bench.OURS_FP8: 16.0}
    path.write_text(json.dumps(bench))
    lines = results_table.fp8_speeds()
    assert lines[-2:] == [
        f"| {first['heads']} | {first['tokens']} | 10.0 | 1.20 | 25.0 | 2.50 |",
        f"| {second['heads']} | {second['tokens']} | 16.0 | 0.75 | not there | |",
    ]
    assert set(lines) <= set(results_table.render().splitlines())


def test_chosen_tiles_have_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    assert results_table.tiles() == []
    (tmp_path / "tune").mkdir()
    points = {(8, 4): 1.0, (8, 16): 1.126, (64, 4): None}
    chosen = [{"heads": heads, "tokens": rows, "ratio": ratio} for (heads, rows), ratio in points.items()]
    (tmp_path / "tune" / "sm120-fp8.json").write_text(json.dumps({"timings": [], "chosen": chosen}))
    (tmp_path / "tune" / "old.json").write_text(json.dumps({"timings": []}))
    assert results_table.tiles()[3:] == [
        "| heads | 4 | 16 |",
        "|--:|--:|--:|",
        "| 8 | 1.00 | 1.13 |",
        "| 64 | not timed | not timed |",
    ]


def test_gguf_reports_have_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    assert results_table.gguf() == []
    twin = {"differences": {"compiled, ranks": {"near": 0.06896, "far": 0.11165}}}
    drafts = {"bf16": {"steps": 5, "drafted": 20, "accepted": 12}}
    language = {"differences": {"triton": {"near": 0.0015, "far": 0.0026}}, "drafts": drafts}
    (tmp_path / "gguf-two-gpus.json").write_text(json.dumps({"twin": twin}))
    (tmp_path / "gguf-two-gpus-language.json").write_text(json.dumps({"language": language}))
    products = {"products": {"triton": {"a": {"error": 0.001}, "b": {"error": 0.0047}}}}
    (tmp_path / "gguf-wide-text.json").write_text(json.dumps({"products": products}))
    decode = {"8": {"prefill_seconds": 1.017, "tokens_per_second": 1456.2}}
    wide = {"engines": {"wide-compiled": {"start_seconds": 31.5, "decode": decode}}}
    (tmp_path / "gguf-wide.json").write_text(json.dumps({"wide": wide}))
    assert [line for line in results_table.gguf() if line and "---" not in line][2:] == [
        "| step | difference | near | far |",
        "| twin | compiled, ranks | 6.90e-02 | 1.12e-01 |",
        "| language | triton | 1.50e-03 | 2.60e-03 |",
        "Accepted drafts (language): bf16 12 of 20.",
        "Products and those of decoded weights differ, of a row's norm: triton 0.47% (2 shapes).",
        "| widths of GLM-5 | requests | prefill of 512 tokens each, s | decode, tokens / s |",
        "| wide-compiled | 8 | 1.02 | 1456 |",
    ]
