"""Writing a commit as a patch file: one form, whatever git's configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_stack.git import Git

_FORMAT = (
    "format-patch",
    "--stdout",
    "-1",
    # The subject as it stands: no "[PATCH]" that would have to be told from "[Attention]" again.
    "--keep-subject",
    # Nothing that changes without the patch: commit ids, git's version, the diffstat's width.
    "--zero-commit",
    "--no-signature",
    "--no-stat",
    # Whole blob ids, so that a three-way merge finds the blobs in any repository that has them.
    "--full-index",
    "--binary",
    "--no-renames",
    "--unified=3",
    "--diff-algorithm=myers",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-attach",
    "--no-thread",
    "--no-to",
    "--no-cc",
    "--no-add-header",
    "--no-notes",
    "--encode-email-headers",
)


def export_commit(git: Git, commit: str) -> bytes:
    """Return ``commit`` as the bytes of a patch file."""
    return git.run(*_FORMAT, commit).stdout
