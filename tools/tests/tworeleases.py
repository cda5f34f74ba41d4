"""Two releases of an upstream in one real repository, and patches that were made for the first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stackproject import message

from vllm_stack.applying import apply_patch
from vllm_stack.base import init_repository
from vllm_stack.carrying import carry
from vllm_stack.export import export_commit
from vllm_stack.patch import Patch
from vllm_stack.replay import PatchPlace
from vllm_stack.series import SeriesEntry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vllm_stack.git import Git

Content = str | bytes
Files = dict[str, Content]


def commit_files(git: Git, files: Mapping[str, str | bytes], text: str, parent: str | None = None) -> str:
    """Commit exactly these files and return the commit."""
    lines = []
    for path, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        blob = git.run("hash-object", "-w", "--stdin", stdin=data).text
        lines.append(f"100644 {blob}\t{path}\n")
    index = {"GIT_INDEX_FILE": str(git.git_dir) + "/scratch-index"}
    git.run("read-tree", "--empty", env=index)
    listed = "".join(lines).encode("utf-8", "surrogateescape")
    git.run("update-index", "--index-info", stdin=listed, env=index)
    tree = git.run("write-tree", env=index).text
    parents = ["-p", parent] if parent else []
    return git.run("commit-tree", tree, *parents, "-F", "-", stdin=text.encode()).text


@dataclass
class TwoReleases:
    """demo 1.0.0 and 2.0.0, and a stack for the first."""

    folder: Path
    old: Files
    new: Files
    patches: list[Patch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.git = init_repository(self.folder / "releases.git", bare=True)
        self.old_base = commit_files(self.git, self.old, "Import demo 1.0.0\n\nSource: x\n")
        self.new_base = commit_files(self.git, self.new, "Import demo 2.0.0\n\nSource: y\n")
        self.head, self.files = self.old_base, dict(self.old)

    def add_patch(
        self, changes: Mapping[str, str | bytes | None], subject: str = "[Demo] Change it"
    ) -> Patch:
        """Add a patch that sets files to their new content; None deletes one."""
        files = {**self.files, **changes}
        self.files = {path: content for path, content in files.items() if content is not None}
        self.head = commit_files(self.git, self.files, message(subject), self.head)
        patch = Patch(f"{len(self.patches) + 100:04d}-demo-change.patch", export_commit(self.git, self.head))
        self.patches.append(patch)
        return patch

    def places(self) -> list[PatchPlace]:
        """Return the place of each patch; on the new release what conflicts is left out."""
        before, here, places = self.old_base, self.new_base, []
        for patch in self.patches:
            after = apply_patch(self.git, before, patch).commit
            assert after
            attempt = carry(self.git, patch, before, after, here)
            entry = SeriesEntry(file=patch.name, topic="demo-topic", test="true")
            place = PatchPlace(
                self.git, entry, patch, self.old_base, self.new_base, before, after, here, None
            )
            places.append(place)
            if attempt.tree and attempt.outcome.applied:
                here = self.git.run("commit-tree", attempt.tree, "-p", here, "-m", "x").text
            before = after
        return places

    @property
    def place(self) -> PatchPlace:
        """The place of the last patch."""
        return self.places()[-1]
