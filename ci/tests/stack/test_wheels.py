"""Both real wheels: built from the real pins, installed with pip and with uv, imported, verified."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from realstacks import ROOT, TARGETS, run_tool
from vllm_stack.build import BuildOptions, plan_wheel
from vllm_stack.classify import PathClass, classify
from vllm_stack.commands.build_wheel import default_arch
from vllm_stack.fetch import Fetcher
from vllm_stack.hashing import sha256_file
from vllm_stack.pins import load_pin
from vllm_stack.stack import Stack
from vllm_stack.workspace import Workspace

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
        assert wheel["left_out"] == outside(Stack.load(Workspace.locate(), wheel["target"]))


def outside(stack: Stack) -> list[dict[str, Any]]:
    """Return what of a stack belongs in no wheel, as a report lists it, by what its patches say."""
    touching: dict[str, list[str]] = {}
    for patch in stack.patches:
        for path in patch.paths:
            if classify(path, stack.pin.layout) is PathClass.OUTSIDE:
                touching.setdefault(path, []).append(patch.name)
    return [{"path": path, "patches": names} for path, names in sorted(touching.items())]


OVERLAY = """
import json, pathlib, pickle, re, sys, types, zlib
arguments = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
from vllm_stack import wheelzip
from vllm_stack.overlay import build_overlay
inflated = 0
class Counted:
    def __init__(self, *given):
        self._inner = zlib.decompressobj(*given)
    def __getattr__(self, name):
        return getattr(self._inner, name)
    def decompress(self, *given):
        global inflated
        data = self._inner.decompress(*given)
        inflated += len(data)
        return data
wheelzip.zlib = types.SimpleNamespace(**vars(zlib) | {"decompressobj": Counted})
result = build_overlay(*arguments)
# Not ru_maxrss: a new process inherits that from the one that started it.
status = pathlib.Path("/proc/self/status").read_text()
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
print(json.dumps({"inflated": inflated, "bytes": peak, "sha256": result.sha256}))
"""


def test_the_overlay_of_vllm_unpacks_and_holds_little(built: Built, tmp_path: Path) -> None:
    workspace = Workspace.locate()
    stack = Stack.load(workspace, "vllm")
    plan, _ = plan_wheel(workspace, stack, BuildOptions(default_arch(), tmp_path), offline=True)
    fetcher = Fetcher(workspace.downloads, offline=True)
    official, sdist = (fetcher.fetch("vllm", pinned) for pinned in (plan.wheel, stack.pin.sdist))
    arguments = tmp_path / "arguments.pickle"
    arguments.write_bytes(pickle.dumps((plan, official, sdist, tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", OVERLAY, arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["sha256"] == built.report["wheels"][0]["output"]["sha256"]
    assert 0 < seen["inflated"] < 5_000_000
    assert seen["bytes"] < 100_000_000


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
    """Make an environment with nothing of ours, that borrows what vLLM imports; return its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for entry in (RUNTIME / packages).iterdir():
        if not entry.name.startswith(("vllm", "pip", "__")):
            (borrowed / entry.name).symlink_to(entry)
    (folder / packages / "borrowed.pth").write_text(f"{borrowed}\n")
    return folder / "bin" / "python"


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
