"""Carry the files that a built wheel changes to a GPU host, and prove there that they are the wheel's.

    python wheel_files.py pack --wheel dist/vllm-….whl --base vllm-0.33.0-….whl --commit ID --out FILES.zip
    python wheel_files.py install --files FILES.zip --site /tmp/site --out INSTALLED.json

`pack` compares the RECORDs of both wheels and takes the members below `vllm/` that differ. The stack id
is the one that the built wheel's own SBOM names.
`install` checks every file before and after it is copied over the official wheel's, removes members
that the built wheel lacks, and exits 1 if a hash is wrong.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
PACKAGE = "vllm/"
SBOM = "/sboms/vllm-stack.cdx.json"  # in the wheel's .dist-info
STACK_ID = "vllm-stack:stack-id"  # property of the SBOM's root component


class WheelFilesError(Exception):
    """A file is not what the manifest says."""


def sha256(data: bytes) -> str:
    """Return the hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Return the digests that a wheel's RECORD gives for the members of the package."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/RECORD"))
    rows = csv.reader(io.StringIO(wheel.read(name).decode()))
    return {
        path: base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=").hex()
        for path, digest, _ in rows
        if path.startswith(PACKAGE)
    }


def stack_id(wheel: zipfile.ZipFile) -> str:
    """Return the id of the stack that a wheel was built from.

    Raises:
        WheelFilesError: The wheel has no SBOM of the stack, or not exactly one id in it.

    """
    names = [n for n in wheel.namelist() if n.endswith(f".dist-info{SBOM}")]
    if len(names) != 1:
        raise WheelFilesError(f"{wheel.filename} has {len(names)} SBOMs of a stack")
    root = json.loads(wheel.read(names[0]))["metadata"]["component"]
    found = [item["value"] for item in root["properties"] if item["name"] == STACK_ID]
    if len(found) != 1:
        raise WheelFilesError(f"the SBOM of {wheel.filename} names the stack ids {found}")
    return str(found[0])


def pack(wheel: Path, base: Path, out: Path, commit: str) -> dict[str, Any]:
    """Write the changed members and their manifest.

    Args:
        wheel: The built wheel.
        base: The official wheel of the same release, on which the host's bundle rests.
        out: Zip file to write.
        commit: Commit of this repository, for the results.

    Raises:
        WheelFilesError: A member does not have the digest that its RECORD gives, or the stack is unknown.

    """
    with zipfile.ZipFile(wheel) as built, zipfile.ZipFile(base) as official:
        new, old = record(built), record(official)
        members = {path: digest for path, digest in new.items() if old.get(path) != digest}
        manifest = {
            "wheel": {"name": wheel.name, "sha256": file_sha256(wheel)},
            "commit": commit,
            "stack_id": stack_id(built),
            "members": members,
            "removed": sorted(old.keys() - new.keys()),
        }
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
            for path, digest in members.items():
                data = built.read(path)
                if sha256(data) != digest:
                    raise WheelFilesError(f"{path} in {wheel} differs from its RECORD")
                target.writestr(path, data)
            target.writestr(MANIFEST, json.dumps(manifest, indent=1))
    return manifest


def safe_target(site: Path, path: str) -> Path:
    """Return where a member belongs.

    Raises:
        WheelFilesError: The path leaves the package.

    """
    pure = PurePosixPath(path)
    if not path.startswith(PACKAGE) or ".." in pure.parts:
        raise WheelFilesError(f"{path} does not lie in {PACKAGE}")
    return site.joinpath(*pure.parts)


def install(files: Path, site: Path) -> dict[str, Any]:
    """Copy the members over an unpacked official wheel, and check what lies there afterwards.

    Returns:
        The manifest.

    Raises:
        WheelFilesError: A digest is not the manifest's, or members are missing.

    """
    with zipfile.ZipFile(files) as source:
        manifest: dict[str, Any] = json.loads(source.read(MANIFEST))
        extra = set(source.namelist()) ^ {MANIFEST, *manifest["members"]}
        if extra:
            raise WheelFilesError(f"files and manifest differ in {sorted(extra)}")
        for path, digest in manifest["members"].items():
            data = source.read(path)
            if sha256(data) != digest:
                raise WheelFilesError(f"{path} has the wrong digest")
            target = safe_target(site, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    for path in manifest["removed"]:
        safe_target(site, path).unlink(missing_ok=True)
    verify(manifest, site)
    return manifest


def verify(manifest: dict[str, Any], site: Path) -> None:
    """Check the files below `site`.

    Raises:
        WheelFilesError: A file is missing or has another digest.

    """
    wrong = [
        path
        for path, digest in manifest["members"].items()
        if not (target := safe_target(site, path)).is_file() or file_sha256(target) != digest
    ]
    wrong += [path for path in manifest["removed"] if safe_target(site, path).exists()]
    if wrong:
        raise WheelFilesError(f"not the wheel's: {wrong}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--wheel", type=Path, required=True)
    packing.add_argument("--base", type=Path, required=True)
    packing.add_argument("--commit", required=True, help="commit of this repository")
    packing.add_argument("--out", type=Path, required=True)
    installing = commands.add_parser("install")
    installing.add_argument("--files", type=Path, required=True)
    installing.add_argument("--site", type=Path, required=True)
    installing.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    """Pack or install."""
    arguments = parse_arguments()
    try:
        if arguments.command == "pack":
            manifest = pack(arguments.wheel, arguments.base, arguments.out, arguments.commit)
        else:
            manifest = install(arguments.files, arguments.site)
            arguments.out.write_text(json.dumps(manifest, indent=1))
    except WheelFilesError as error:
        print(f"wheel_files: {error}", file=sys.stderr)
        return 1
    print(f"{len(manifest['members'])} files of {manifest['wheel']['name']}, stack {manifest['stack_id']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
