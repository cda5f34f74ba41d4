"""Write the trees that the tests read: each target as pinned, and with its stack applied.

    python ci/make_trees.py FOLDER

Makes FOLDER/TARGET-base and FOLDER/TARGET; a tree that is there already is kept while its commit is the same.
"""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.applying import apply_stack
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack
from vllm_stack.workspace import Workspace

if TYPE_CHECKING:
    from vllm_stack.git import Git


def write_tree(git: Git, commit: str, folder: Path) -> None:
    """Write the files of ``commit`` to ``folder``."""
    mark = folder.with_name(f"{folder.name}.commit")
    if mark.exists() and mark.read_text() == commit:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(git.run("archive", commit).stdout)) as archive:
        archive.extractall(folder, filter="data")
    mark.write_text(commit)


def main() -> None:
    """Write the trees of all targets."""
    destination = Path(sys.argv[1])
    workspace = Workspace.locate()
    for target in workspace.targets():
        stack = Stack.load(workspace, target)
        applied = apply_stack(base_of(workspace, stack.pin, offline=False), stack)
        write_tree(applied.git, applied.base_commit, destination / f"{target}-base")
        write_tree(applied.git, applied.head, destination / target)


if __name__ == "__main__":
    main()
