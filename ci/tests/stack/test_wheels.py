"""Both real wheels: built from the real pins, installed with pip and with uv, imported, verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from realstacks import ROOT, TARGETS, run_tool
from vllm_stack.hashing import sha256_file
from vllm_stack.pins import load_pin

if TYPE_CHECKING:
    from collections.abc import Callable

#: Has torch and what vLLM imports; the fresh environments below borrow them.
RUNTIME = ROOT / ".venv-vllm"
NAMES = {
    "blk.0.indexer.weights_proj.weight": (
        "blk.0.indexer.weights_proj.qweight",
        "blk.0.indexer.weights_proj.qweight_type",
    ),
    "experts.w2_weight": ("experts.w2_qweight", "experts.w2_qweight_type"),
}


@dataclass(frozen=True)
class Built:
    """The wheels of one build."""

    folder: Path
    report: dict[str, Any]

    @property
    def paths(self) -> list[Path]:
        """The wheels, in the order of the targets."""
        return [self.folder / wheel["output"]["filename"] for wheel in self.report["wheels"]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both wheels for this machine."""
    folder = tmp_path_factory.mktemp("dist")
    return Built(folder, run_tool("build-wheel", "--output", folder))


def test_the_report_says_what_went_in_and_what_came_out(built: Built) -> None:
    assert [wheel["target"] for wheel in built.report["wheels"]] == list(TARGETS)
    for wheel, path in zip(built.report["wheels"], built.paths, strict=True):
        pin = load_pin(ROOT / "upstream" / f"{wheel['target']}.toml")
        inputs = {item["filename"]: item["sha256"] for item in wheel["inputs"]}
        assert inputs[pin.sdist.filename] == pin.sdist.sha256
        assert {item.sha256 for item in pin.wheels} & set(inputs.values())
        assert wheel["output"]["sha256"] == sha256_file(path)
        assert wheel["output"]["size"] == path.stat().st_size
        assert wheel["version"].startswith(f"{pin.release}+bw.")
        assert wheel["changed"] or wheel["added"]
        assert all(item["path"].startswith("tests/") for item in wheel["left_out"] if "test" in item["path"])


def test_building_again_gives_the_same_bytes(built: Built, tmp_path: Path) -> None:
    run_tool("build-wheel", "--output", tmp_path, "--offline")
    again = {path.name: sha256_file(path) for path in tmp_path.glob("*.whl")}
    assert again == {path.name: sha256_file(path) for path in built.paths}


def test_the_wheels_verify(built: Built) -> None:
    report = run_tool("verify", *built.paths)
    assert [item["findings"] for item in report["verified"]] == [[], []]
    assert all(item["patched"] for item in report["verified"])


def test_a_flipped_byte_of_a_real_wheel_is_found(built: Built, tmp_path: Path) -> None:
    original = built.paths[1]
    data = bytearray(original.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / original.name
    damaged.write_bytes(data)
    assert run_tool("verify", damaged, code=8)["error"]["kind"] == "verification"


def make_environment(folder: Path) -> Path:
    """Make an empty environment that sees the runtime's packages behind its own; return its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = RUNTIME / "lib" / version / "site-packages"
    (folder / "lib" / version / "site-packages" / "runtime.pth").write_text(f"{borrowed}\n")
    return python


def install_with_pip(python: Path, wheels: list[Path]) -> list[str | Path]:
    """Return the command that installs with pip."""
    return [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *wheels]


def install_with_uv(python: Path, wheels: list[Path]) -> list[str | Path]:
    """Return the command that installs with uv."""
    uv = Path(sys.executable).with_name("uv")
    return [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        "--no-deps",
        "--no-index",
        "--offline",
        *wheels,
    ]


IMPORT = """
import json, pathlib, importlib.metadata as m, warnings
warnings.simplefilter("ignore")
import vllm, vllm._version, vllm_gguf_plugin
from vllm_gguf_plugin.weight_utils import get_gguf_quant_param_names as rename
print(json.dumps({
    "files": [vllm.__file__, vllm_gguf_plugin.__file__],
    "versions": [vllm.__version__, vllm._version.version, m.version("vllm"), m.version("vllm-gguf-plugin")],
    "tuple": list(vllm._version.version_tuple),
    "names": {name: list(rename(name)) for name in NAMES},
}))
"""


@pytest.mark.parametrize("install", [install_with_pip, install_with_uv])
def test_installed_and_imported(
    built: Built, tmp_path: Path, install: Callable[[Path, list[Path]], list[str | Path]]
) -> None:
    python = make_environment(tmp_path / "environment")
    subprocess.run(install(python, built.paths), check=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    code = f"NAMES = {list(NAMES)!r}\n{IMPORT}"
    done = subprocess.run(
        [python, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    vllm, plugin = (wheel["version"] for wheel in built.report["wheels"])
    assert all(file.startswith(str(tmp_path)) for file in seen["files"])
    assert seen["versions"] == [vllm, vllm, vllm, plugin]
    assert seen["tuple"][:3] == [0, 33, 0]
    assert {name: tuple(names) for name, names in seen["names"].items()} == NAMES
    report = run_tool("verify", "--installed", "--python", python)
    assert [item["findings"] for item in report["verified"]] == [[], []]
    damaged = Path(seen["files"][1])
    damaged.write_text(damaged.read_text() + "\n# edited in place\n")
    assert run_tool("verify", "--installed", "--python", python, code=8)["error"]["kind"] == "verification"
