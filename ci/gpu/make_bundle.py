"""Pack vLLM and what it needs to run as pieces for a GPU host that has torch but no network.

    python ci/gpu/make_bundle.py --out .gpu-bundle [--wheel dist/vllm-….whl] [--piece-mb 50]

Makes a site folder for the host's Python out of a vLLM wheel (the official one, or a patched one) and
the wheels that it requires, leaves out what the host has already, compresses it, and cuts it into pieces
small enough to carry one at a time. On the host `unpack.sh DIR` puts them together again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Collection

HERE = Path(__file__).resolve().parent
RELEASE = "0.33.0"
PIECE_MB = 50
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
# Not needed to serve a text model on one GPU, or much too large to carry.
SKIP = re.compile(
    r"^(torch|torchaudio|torchvision|torchcodec|triton|pynvvideocodec|flashinfer.*|tilelang|nvidia-(?!cutlass-dsl).*|"
    r"nvtx|fastsafetensors|instanttensor|tokenspeed-.*|humming-.*|numba|opencv-.*|cuda-.*|supervisor)$"
)
EXTRA = [
    "nvidia-cutlass-dsl==4.8.0",
    "nvidia-cutlass-dsl-libs-base==4.8.0",
    "nvidia-cutlass-dsl-libs-core==4.8.0",
    "nvidia-cutlass-dsl-libs-cu13==4.8.0",
    "quack-kernels==0.6.5",
    "torch-c-dlpack-ext",
    "apache-tvm-ffi==0.1.11",
    "gguf==0.19.0",  # with pycountry, which the tokenizers import that it loads, and what the host has
]
# Native modules that no DSA model loads on SM90; FA2 alone is 300 MB.
DROP = ("_vllm_fa2_C", "_deepselect_C", "stubs/")
# Taken in vLLM's releases even where the host has others.
ALWAYS = ("transformers", "tokenizers")


def pip(*words: str) -> None:
    """Run pip."""
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def target_options(python: str) -> list[str]:
    """Return pip's options for the host's Python."""
    words = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    return words + [word for platform in PLATFORMS for word in ("--platform", platform)]


def requirements(wheel: Path, python: str) -> list[str]:
    """Return what the wheel requires on the host, less what is skipped."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    host = {
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
    }
    found = [Requirement(line.split(": ", 1)[1]) for line in lines if line.startswith("Requires-Dist: ")]
    return [
        f"{item.name}{'[' + ','.join(item.extras) + ']' if item.extras else ''}{item.specifier}"
        for item in found
        if (item.marker is None or item.marker.evaluate(host))
        and not SKIP.match(canonicalize_name(item.name))
    ]


def missing_packages(wheel: Path, python: str, have: Collection[str], work: Path) -> list[str]:
    """Return the exact releases that the host lacks."""
    report = work / "report.json"
    words = ["install", "-q", "--dry-run", "--ignore-installed", *target_options(python)]
    pip(*words, "--target", str(work / "site"), "--report", str(report), *requirements(wheel, python))
    extra = {canonicalize_name(item.split("==")[0]) for item in EXTRA}
    wanted = []
    for item in json.loads(report.read_text())["install"]:
        name, version = canonicalize_name(item["metadata"]["name"]), item["metadata"]["version"]
        if not SKIP.match(name) and name not in extra and (name not in have or name in ALWAYS):
            wanted.append(f"{name}=={version}")
    return wanted


def unpack(wheels: list[Path], site: Path) -> None:
    """Unpack wheels into one folder; programs stay executable."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if any(part in info.filename for part in DROP):
                    continue
                archive.extract(info, site)
                if (info.external_attr >> 16) & 0o111 and not info.is_dir():
                    path = site / info.filename
                    path.chmod(path.stat().st_mode | 0o111)


def cut(site: Path, out: Path, work: Path, megabytes: int) -> list[Path]:
    """Compress the folder and cut it into pieces of at most ``megabytes``."""
    for old in out.glob("piece*"):
        shutil.rmtree(old)
    archive = work / "site.txz"
    subprocess.run(["tar", "-C", site, "-I", "xz -2 -T0", "-cf", archive, "."], check=True)
    subprocess.run(["split", "-b", f"{megabytes}m", "-d", "-a", "2", archive, f"{archive}."], check=True)
    archive.unlink()
    pieces = []
    for number, part in enumerate(sorted(work.glob("site.txz.*"))):
        folder = out / f"piece{number:02d}"
        folder.mkdir()
        pieces.append(Path(shutil.move(part, folder / part.name)))
    return pieces


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", type=Path, help=f"vLLM wheel; default: download vllm=={RELEASE}")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--piece-mb", type=int, default=PIECE_MB, help="a call carries 64 with the tree")
    parser.add_argument("--have", type=Path, default=HERE / "host-packages.txt", help="what the host has")
    options = parser.parse_args()
    work = options.out / "work"
    shutil.rmtree(work, ignore_errors=True)
    (work / "whl").mkdir(parents=True)
    wheel = options.wheel
    if wheel is None:
        words = ["--no-deps", *target_options(options.python), "-d", str(work), f"vllm=={RELEASE}"]
        pip("download", *words)
        wheel = next(work.glob("vllm-*.whl"))
    have = {canonicalize_name(line) for line in options.have.read_text().split()}
    wanted = missing_packages(wheel, options.python, have, work)
    target = target_options(options.python)
    pip("download", "-q", "--no-deps", *target, "-d", str(work / "whl"), *wanted, *EXTRA)
    unpack([*sorted((work / "whl").glob("*.whl")), wheel], work / "site")
    pieces = cut(work / "site", options.out, work, options.piece_mb)
    shutil.copy(HERE / "unpack.sh", options.out / "unpack.sh")
    size = sum(piece.stat().st_size for piece in pieces) / 1e6
    shutil.rmtree(work)
    print(f"{len(pieces)} pieces, {size:.0f} MB")


if __name__ == "__main__":
    main()
