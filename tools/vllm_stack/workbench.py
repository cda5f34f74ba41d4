"""Workbenches: repositories that see the objects of several bases without copying any."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.base import init_repository
from vllm_stack.errors import BuildError, UsageError
from vllm_stack.git import require_git

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.base import Base
    from vllm_stack.git import Git

#: The first git whose `merge-tree` merges commits without a working tree and follows renames.
MERGING_GIT = (2, 38)


@contextmanager
def open_workbench(*bases: Base) -> Iterator[Git]:
    """Yield git, opened, on a bare scratch repository that has all objects of ``bases``.

    What is made in it vanishes with it. UsageError when git is too old to merge without a working tree.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-stack-") as folder:
        git = init_repository(Path(folder) / "workbench.git", bare=True)
        borrow_objects(git, *bases)
        with git.opened() as opened:
            yield opened


def borrow_objects(git: Git, *bases: Base) -> None:
    """Let the repository of ``git`` read the objects of ``bases`` where they lie."""
    version = require_git()
    if version < MERGING_GIT:
        needed, present = (".".join(map(str, numbers)) for numbers in (MERGING_GIT, version))
        raise UsageError(f"git {present} cannot merge releases", hint=f"install git {needed} or newer")
    folders = [base.git.git_dir / "objects" for base in bases if base.git.git_dir is not None]
    if any("\n" in str(folder) for folder in folders) or git.git_dir is None:
        raise BuildError("the name of the cache folder holds a line feed, which git cannot borrow from")
    listed = "".join(f"{folder}\n" for folder in dict.fromkeys(folders))
    (git.git_dir / "objects" / "info" / "alternates").write_bytes(listed.encode("utf-8", "surrogateescape"))
