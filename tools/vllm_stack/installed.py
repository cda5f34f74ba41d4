"""Installations of a distribution, as the user's own interpreter sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_stack.errors import IntegrityError, UsageError
from vllm_stack.record import Digest

#: In which tools/vllm-stack hands on the user's PYTHONPATH, from which it keeps this program itself.
USER_PYTHONPATH = "VLLM_STACK_USER_PYTHONPATH"
#: Runs in the inspected interpreter; nothing of the distribution is imported.
_QUERY = """
import importlib.metadata, importlib.util, json, sys
name, package = sys.argv[1:]
sys.path[:] = [entry for entry in sys.path if entry]
found = {}
for item in importlib.metadata.distributions(name=name):
    folder = str(getattr(item, "_path", ""))
    found.setdefault(folder, {"dist_info": folder, "root": str(item.locate_file(""))})
try:
    spec = importlib.util.find_spec(package)
except (ImportError, ValueError):
    spec = None
places = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps({"python": sys.executable, "found": list(found.values()), "imported": places}))
"""
#: What installers write into the dist-info folder, with or without a row in RECORD.
_INSTALLER_FILES = frozenset(
    {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json"}
)


@dataclass(frozen=True)
class Installations:
    """What an interpreter finds of a distribution."""

    python: str
    dist_infos: tuple[Path, ...]
    """In the order of its search path: the first one is the one that it uses."""
    roots: tuple[Path, ...]
    """The folder that the paths of each RECORD are relative to."""
    imported: tuple[Path, ...]
    """Where ``import`` would take the package from."""


def default_python() -> str:
    """Return the first ``python3`` or ``python`` on the PATH that is not our own environment's.

    In an activated environment that is its interpreter. UsageError when there is none.
    """
    own = Path(sys.prefix).resolve() if sys.prefix != sys.base_prefix else None
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        for name in ("python3", "python"):
            candidate = Path(folder, name)
            if not folder or not os.access(candidate, os.X_OK) or candidate.is_dir():
                continue
            if own is None or candidate.parent.resolve().parent != own:
                return str(candidate)
    raise UsageError("there is no Python on the PATH", hint="name the interpreter with --python")


def find_installations(python: str, distribution: str, package: str) -> Installations:
    """Ask the interpreter ``python`` where ``distribution`` is installed. UsageError when it cannot say."""
    # It runs elsewhere, so that a package in the current folder is not found; links stay as they are, because
    # an environment's interpreter is one.
    program = str(Path(python).expanduser().absolute()) if os.sep in python else python
    command = [program, "-c", _QUERY, distribution, package]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            cwd=os.sep,
            env=users_environment(),
            text=True,
            encoding="utf-8",
        )
        answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot run {python}: {error}", hint="name a Python interpreter with --python"
        ) from error
    if not answer:
        raise UsageError(f"{python} is not a usable Python", details=done.stderr.strip().splitlines()[-5:])
    return Installations(
        python=answer["python"],
        dist_infos=tuple(Path(item["dist_info"]) for item in answer["found"]),
        roots=tuple(Path(item["root"]) for item in answer["found"]),
        imported=tuple(Path(place) for place in answer["imported"]),
    )


def users_environment() -> dict[str, str]:
    """Return the variables under which the user would start Python in the current folder."""
    environment = dict(os.environ)
    search = environment.pop(USER_PYTHONPATH, None) or environment.pop("PYTHONPATH", None)
    if search:
        # What is relative, and an empty entry, means the user's folder; the interpreter runs in another.
        entries = map(os.path.abspath, search.split(os.pathsep))
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


class InstalledContents:
    """The files of one installation, by their path in RECORD."""

    strict = False

    def __init__(self, dist_info: Path, root: Path, package: str) -> None:
        self.label = str(dist_info)
        self.dist_info = dist_info.name
        self._root = root
        self._package = package

    def paths(self) -> set[str]:
        """Return the files below the package and the dist-info folder, without what Python makes itself."""
        found: set[str] = set()
        for top in (self._package, self.dist_info):
            for folder, _, names in os.walk(self._root / top):
                if Path(folder).name != "__pycache__":
                    found |= {Path(folder, name).relative_to(self._root).as_posix() for name in names}
        return found

    def exists(self, path: str) -> bool:
        """Say whether a path of RECORD, which may lead out of the root, is a file."""
        return (self._root / path).is_file()

    def ignores(self, path: str) -> bool:
        """Say whether RECORD need not have ``path``, or not with a hash."""
        folder, _, name = path.rpartition("/")
        compiled = folder.endswith("/__pycache__") and name.endswith(".pyc")
        return compiled or (folder == self.dist_info and name in _INSTALLER_FILES)

    def digest(self, path: str) -> Digest:
        """Return hash and size of a file. IntegrityError when it cannot be read."""
        try:
            with (self._root / path).open("rb") as file:
                return Digest.of_stream(file)
        except OSError as error:
            raise IntegrityError(f"{path}: cannot be read: {error.strerror}") from error

    def read(self, path: str) -> bytes:
        """Return the content of a file. IntegrityError when it cannot be read."""
        try:
            return (self._root / path).read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path}: cannot be read: {error.strerror}") from error

    def head(self, path: str, size: int) -> bytes:
        """Return the first bytes of a file. IntegrityError when it cannot be read."""
        try:
            with (self._root / path).open("rb") as file:
                return file.read(size)
        except OSError as error:
            raise IntegrityError(f"{path}: cannot be read: {error.strerror}") from error
