"""Run upstream's own checks on the files that a stack changes.

    python ci/upstream_checks.py CHECKOUT FILE...

Runs ruff (check and format) and typos with the checkout's configuration, and every hook of its
.pre-commit-config.yaml that is a Python script of its own and matches a file. pre-commit itself would clone
the repositories of all hooks. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

_SUFFIXES = {"python": (".py",), "pyi": (".pyi",), "rust": (".rs",), "proto": (".proto",)}


@dataclass(frozen=True)
class Check:
    """One command and the files that it is for."""

    name: str
    command: tuple[str, ...]
    files: tuple[str, ...]


def linters(files: tuple[str, ...]) -> list[Check]:
    """Return the checks whose configuration is in the checkout's pyproject.toml."""
    python = tuple(file for file in files if file.endswith(".py"))
    module = (sys.executable, "-m")
    return [
        Check("ruff-check", (*module, "ruff", "check", "--no-cache"), python),
        Check("ruff-format", (*module, "ruff", "format", "--no-cache", "--check", "--diff"), python),
        Check("typos", (str(Path(sys.executable).with_name("typos")), "--force-exclude"), files),
    ]


def hooks(checkout: Path, files: tuple[str, ...]) -> list[Check]:
    """Return the local hooks that are Python scripts of the checkout, with the files that they match."""
    configuration = checkout / ".pre-commit-config.yaml"
    if not configuration.exists():
        return []
    repositories = yaml.safe_load(configuration.read_text())["repos"]
    local = [
        hook for repository in repositories if repository["repo"] == "local" for hook in repository["hooks"]
    ]
    return [_hook(hook, files) for hook in local if hook["entry"].startswith("python tools/pre_commit/")]


def _hook(hook: dict[str, object], files: tuple[str, ...]) -> Check:
    command = (sys.executable, *shlex.split(str(hook["entry"]))[1:])
    matching = tuple(file for file in files if _matches(hook, file))
    if hook.get("always_run"):
        return Check(str(hook["id"]), command, ("",))
    if hook.get("pass_filenames", True):
        return Check(str(hook["id"]), command, matching)
    return Check(str(hook["id"]), command, ("",) if matching else ())


def _matches(hook: dict[str, object], file: str) -> bool:
    """Say whether pre-commit would give ``file`` to the hook."""
    kinds = [*_words(hook.get("types")), *_words(hook.get("types_or"))]
    suffixes = tuple(suffix for kind in kinds for suffix in _SUFFIXES[kind])
    return (
        re.search(str(hook.get("files", "")), file) is not None
        and re.search(str(hook.get("exclude", "^$")), file) is None
        and (not kinds or file.endswith(suffixes))
    )


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def run(check: Check, checkout: Path) -> bool:
    """Run a check, say what it found, and return whether it passed."""
    if not check.files:
        print(f"{check.name}: no file of the stack is for it")
        return True
    arguments = [file for file in check.files if file]
    # Hooks start programs of their own environment, as pre-commit gives them.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*check.command, *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{check.name}: {'passed' if done.returncode == 0 else 'FAILED'}, {len(arguments)} files")
    if done.returncode:
        print(done.stdout + done.stderr)
    return done.returncode == 0


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    files = tuple(file for file in options.files if (options.checkout / file).exists())
    results = [run(check, options.checkout) for check in [*linters(files), *hooks(options.checkout, files)]]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
