"""A stack repository whose upstream has a second release, found without an index."""

from __future__ import annotations

import copy
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from stackproject import GENERATED, Project, make_sdist, message

from vllm_stack.base import Base
from vllm_stack.commands import rebase_upstream
from vllm_stack.git import Git
from vllm_stack.hashing import sha256_bytes
from vllm_stack.pins import load_pin, parse_pin
from vllm_stack.releases import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from stackproject import Completed

    from vllm_stack.workspace import Workspace


@dataclass
class Upstream:
    """The releases of ``demo`` that can be found, in place of an index."""

    project: Project
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def release(self, version: str, files: Mapping[str, str | bytes]) -> Candidate:
        """Publish a release with exactly ``files``."""
        top = f"demo-{version}"
        sdist = self.project.root.parent / f"{top}.tar.gz"
        make_sdist(sdist, {**files, **GENERATED}, top)
        data = sdist.read_bytes()
        text = self.project.pin_text(sha256_bytes(data), len(data)).replace("1.0.0", version)
        pin = parse_pin(f"# Pin of {version}.\n{text}", source="candidate")
        base = Base.ensure(self.project.workspace, pin, sdist)
        candidate = Candidate(version, pin, f"# Pin of {version}.\n{text}", base, "index")
        self.candidates[version] = candidate
        return candidate

    def find(self, workspace: Workspace, target: str, wanted: str, **_options: Any) -> Candidate:
        """Stand in for ``find_candidate``."""
        assert (workspace.root, target) == (self.project.root, "demo")
        return self.candidates[wanted]

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Let the command find the releases while the block runs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rebase_upstream, "find_candidate", self.find)
            yield


@dataclass
class Rebased:
    """A project with a stack, a second release, and the command between them."""

    project: Project
    upstream: Upstream

    @classmethod
    def make(cls, project: Project) -> Rebased:
        """Put a second release beside the project's."""
        return cls(project, Upstream(project))

    @property
    def tree(self) -> Path:
        """Where conflicts are resolved."""
        return self.project.root / ".vllm-stack" / "rebase-demo" / "tree"

    def run(self, *words: str) -> Completed:
        """Run ``rebase-upstream`` on the project."""
        with self.upstream.at_hand():
            return self.project.run("rebase-upstream", "--target", "demo", *words)

    def verdicts(self, done: Completed) -> list[str]:
        """Return the verdicts of a report, in order."""
        return [patch["verdict"] for patch in done.report["patches"]]

    def everything(self) -> dict[str, bytes]:
        """Return every file of the project that a rebase could change, with its bytes.

        Of the checkout: its files, where its refs are, and what the tools know of it.
        """
        root = self.project.root
        found = {
            str(path.relative_to(root)): path.read_bytes()
            for folder in ("upstream", "patch-stack")
            for path in sorted((root / folder).rglob("*"))
            if path.is_file() and ".git" not in path.relative_to(root).parts
        }
        if self.project.checkout.exists():
            found["state"] = (self.project.checkout / ".git" / "vllm-stack.json").read_bytes()
            found["refs"] = self._refs()
        return found

    def _refs(self) -> bytes:
        """Return where the refs are; of the notes what they say, as their history grows with each writing."""
        words = ("for-each-ref", "--format=%(refname) %(objectname) %(tree)")
        refs = Git.checkout(self.project.checkout).run(*words).lines
        shown = (" ".join(line.split()[::2]) if line.startswith("refs/notes/") else line for line in refs)
        return "\n".join(shown).encode() + (self.project.checkout / ".git" / "HEAD").read_bytes()

    def write(self, path: str, text: str) -> None:
        """Write a file of the tree in which a conflict is resolved."""
        (self.tree / path).write_text(text)

    def git(self, *words: str) -> str:
        """Run git in that tree as a person would, with their configuration but without hooks."""
        return self.project.git(*words, cwd=self.tree)


FIVE = [
    "0100-demo-topic-return-a-hundred.patch",
    "0101-demo-topic-add-a-module.patch",
    "0102-demo-topic-return-five-hundred.patch",
    "0103-demo-topic-return-nine-hundred.patch",
    "0200-second-make-it-two.patch",
]


def copy_of(project: Project, root: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """Return the same project at another place, which takes a fraction of the time of making it anew."""
    shutil.copytree(project.root, root, symlinks=True)
    copied = copy.copy(project)
    copied.root, copied.capsys, copied.sdist = root, capsys, root / project.sdist.name
    base = Base.find(copied.workspace, load_pin(copied.workspace.pin_file("demo")))
    assert base is not None
    copied.base = base
    return copied


def add_five(project: Project) -> None:
    """Make a stack of five patches, with a checkout in step."""
    project.ok("apply")
    project.edit("demo/core.py", "return 1\n", "return 100\n")
    project.commit(message("[Core] Return a hundred"))
    project.write("demo/new.py", "from demo.core import function_7\n\nNEW = function_7\n")
    project.edit("tests/test_core.py", "pass", "assert True")
    project.commit(message("[Core][New] Add a module"))
    project.edit("demo/core.py", "return 5\n", "return 500\n")
    project.commit(message("[Core] Return five hundred"))
    project.edit("demo/core.py", "return 9\n", "return 900\n")
    project.commit(message("[Core] Return nine hundred"))
    project.edit("demo/other.py", "VALUE = 1", "VALUE = 2")
    project.commit(message("[Second] Make it two", topic="second"))
    project.ok("refresh")
    assert [patch.name for patch in project.stack.patches] == FIVE
