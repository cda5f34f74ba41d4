"""The project's own repository: asked, never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_stack.git import Git

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def uncommitted(root: Path, paths: Sequence[str]) -> list[str]:
    """Return what is not committed below ``root``, one line each in git's short form.

    ``paths`` are git's patterns, relative to ``root``. Empty when ``root`` lies in no repository.
    """
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    if top is None:
        return []
    git = Git(top / ".git", top)
    words = ("status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames", "--")
    return git.run(*words, *(f":(glob){(root / path).relative_to(top)}" for path in paths)).fields
