"""Upstream's repository and its sdists give the same bases and the same patches, at the real size.

No git server can be reached from everywhere, so that the repository is made here: the trees of the real
sdists, tagged as upstream tags them, with a commit for each folder that changed in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from realstacks import ROOT, release_base
from vllm_stack.applying import apply_stack
from vllm_stack.base import init_repository
from vllm_stack.export import export_commit
from vllm_stack.gitsource import UpstreamRepository, compare_trees
from vllm_stack.stack import Stack
from vllm_stack.workbench import borrow_objects
from vllm_stack.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.base import Base
    from vllm_stack.git import Git

RELEASES = ("0.31.0", "0.32.0", "0.33.0")
SPLIT = ("vllm", "vllm/v1", "vllm/v1/attention", "vllm/v1/attention/backends")


@dataclass(frozen=True)
class Made:
    """A repository that was made of the releases."""

    repository: UpstreamRepository
    bases: dict[str, Base]
    folders: dict[str, str]
    """Id of the commit that brought a folder to what the next release has, by release and folder."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    workspace = Workspace.locate(ROOT)
    pin = Stack.load(workspace, "vllm").pin
    folder = tmp_path_factory.mktemp("upstream")
    bases = {release: release_base(release) for release in RELEASES}
    git = init_repository(folder / "upstream.git", bare=True)
    borrow_objects(git, *bases.values())
    git.run("config", "uploadpack.allowFilter", "true")
    folders = dict(_histories(git, bases))
    elsewhere = Workspace(ROOT, tmp_path_factory.mktemp("cache"))
    url = (folder / "upstream.git").as_uri()
    return Made(UpstreamRepository.of(elsewhere, pin.model_copy(update={"git": url})), bases, folders)


def _histories(git: Git, bases: dict[str, Base]) -> Iterator[tuple[str, str]]:
    """Make the commits and the tags; yield (release and folder, commit)."""
    head = None
    number = 0
    for release, base in bases.items():
        target = base.git.tree(base.commit)
        if head is None:
            head = git.run("commit-tree", target, "-m", "[Misc] Begin (#1)").text
        for folder, tree in _steps(git, git.tree(head), target):
            number += 1
            words = ("commit-tree", tree, "-p", head, "-m", f"[{folder or 'Root'}] Change it (#{number})")
            head = git.run(*words).text
            yield f"{release} {folder}", head
        assert git.tree(head) == target
        git.run("tag", f"v{release}", head)


def _steps(git: Git, old: str, new: str) -> Iterator[tuple[str, str]]:
    """Yield (folder, whole tree) while ``old`` becomes ``new``, folder by folder, the deepest first."""
    now = old
    for folder in (*reversed(SPLIT), ""):
        wanted = _tree_at(git, new, folder)
        changed = _with(git, now, folder, wanted)
        if changed != now:
            now = changed
            yield folder, now


def _tree_at(git: Git, tree: str, folder: str) -> str:
    return git.resolve(f"{tree}:{folder}") if folder else tree


def _with(git: Git, tree: str, folder: str, content: str) -> str:
    """Return ``tree`` with another tree at ``folder``."""
    if not folder:
        return content
    top, _, rest = folder.partition("/")
    inner = _with(git, git.resolve(f"{tree}:{top}"), rest, content)
    entries = [entry for entry in git.run("ls-tree", "-z", tree).fields if entry.partition("\t")[2] != top]
    listing = "".join(f"{entry}\0" for entry in (*entries, f"040000 tree {inner}\t{top}"))
    return git.run("mktree", "-z", stdin=listing.encode()).text


@pytest.mark.parametrize("release", RELEASES)
def test_a_tag_gives_the_files_of_the_sdist(made: Made, release: str) -> None:
    commit = made.repository.commit(f"v{release}")
    base = made.repository.base(release, commit, ())
    difference = compare_trees(base, made.bases[release])
    assert (difference.differing, difference.only_git, difference.only_sdist) == ((), (), ())
    assert base.git.tree(base.commit) == made.bases[release].git.tree(made.bases[release].commit)


def test_the_stack_gives_the_same_patches_on_a_tag(made: Made) -> None:
    stack = Stack.load(Workspace.locate(ROOT), "vllm")
    base = made.repository.base("0.33.0", made.repository.commit("v0.33.0"), stack.pin.layout.generated)
    applied = apply_stack(base, stack)
    exported = [export_commit(base.git, str(patch.commit)) for patch in applied.patches]
    assert exported == [patch.data for patch in stack.patches]


def test_the_commits_that_touched_a_file_are_found(made: Made) -> None:
    source = made.repository
    history = source.history(source.commit("v0.31.0"), source.commit("v0.33.0"))
    path = "vllm/v1/attention/backends/registry.py"
    commits = history.touching(path, range(1, 400))
    expected = [made.folders[f"{release} {Path(path).parent}"] for release in RELEASES[1:]]
    assert [commit.id for commit in commits] == expected
    assert all(commit.pull_request for commit in commits)
    assert history.touching("LICENSE", range(1, 10)) == ()
