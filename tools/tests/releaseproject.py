"""A stack repository whose upstream has a second release, found without an index."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from stackproject import GENERATED, Project, make_sdist

from vllm_stack.base import Base
from vllm_stack.commands import rebase_upstream
from vllm_stack.hashing import sha256_bytes
from vllm_stack.pins import parse_pin
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
        words = ["git", "-C", str(self.project.checkout), "for-each-ref", "--format=%(refname) %(objectname)"]
        environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_CONFIG_GLOBAL": "/dev/null"}
        refs = subprocess.run(words, capture_output=True, check=True, env=environment).stdout
        return refs + (self.project.checkout / ".git" / "HEAD").read_bytes()

    def write(self, path: str, text: str) -> None:
        """Write a file of the tree in which a conflict is resolved."""
        (self.tree / path).write_text(text)

    def git(self, *words: str) -> str:
        """Run git in that tree as a person would, with their configuration but without hooks."""
        environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(self.project.root.parent)}
        settings = ["-c", "user.name=Person", "-c", "user.email=person@example.invalid"]
        done = subprocess.run(
            ["git", *settings, *words],
            cwd=self.tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
