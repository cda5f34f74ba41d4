"""An upstream project for tests: a real git repository with releases, their sdists, and an index of them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stackproject import FILES, make_sdist

from vllm_stack.index import PackageIndex
from vllm_stack.pip_config import PipConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from indexserver import IndexServer
    from stackproject import Project

PLATFORMS = ("x86_64", "aarch64")


@dataclass
class Upstream:
    """The repository of project ``demo``."""

    folder: Path
    files: dict[str, str] = field(default_factory=lambda: dict(FILES))
    moment: int = 1_600_000_000

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.git("init", "--quiet")
        self.git("config", "uploadpack.allowFilter", "true")
        # The attributes in the tree must not change what tests write and read.
        (self.folder / ".git" / "info").mkdir(exist_ok=True)
        (self.folder / ".git" / "info" / "attributes").write_text("* -text\n")
        self.write(self.files)
        self.commit("[Core] Begin (#1)")

    @property
    def url(self) -> str:
        """What a pin names it by."""
        return self.folder.as_uri()

    def git(self, *words: str) -> str:
        """Run git in the repository and return what it says, without the last newline."""
        return self.read(*words).decode().strip()

    def read(self, *words: str) -> bytes:
        """Run git in the repository, with nobody's configuration but the command's own."""
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_DATE": f"{self.moment} +0000",
            "GIT_COMMITTER_DATE": f"{self.moment} +0000",
        }
        settings = ("-c", "user.name=Upstream", "-c", "user.email=upstream@example.invalid")
        done = subprocess.run(
            ["git", *settings, *words], cwd=self.folder, env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, f"git {words}: {done.stdout!r}{done.stderr!r}"
        return done.stdout

    def blob(self, name: str) -> bytes:
        """Return the bytes of a file of a revision."""
        return self.read("cat-file", "blob", name)

    def write(self, files: Mapping[str, str | None]) -> None:
        """Write files; None removes one."""
        for name, text in files.items():
            path = self.folder / name
            if text is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())

    def commit(self, subject: str, files: Mapping[str, str | None] | None = None) -> str:
        """Commit what was written, an hour after the commit before, and return its id."""
        self.write(files or {})
        self.moment += 3600
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--no-verify", f"--message={subject}")
        return self.git("rev-parse", "HEAD")

    def edit(self, path: str, old: str, new: str, subject: str) -> str:
        """Replace text in a file, commit that, and return the commit."""
        text = (self.folder / path).read_bytes().decode()
        assert old in text
        return self.commit(subject, {path: text.replace(old, new, 1)})

    def tag(self, version: str) -> str:
        """Tag what is there as a release and return its commit."""
        self.git("tag", f"v{version}")
        return self.git("rev-parse", "HEAD")

    def sdist(self, version: str, other: Mapping[str, str] | None = None) -> bytes:
        """Return the source archive of a tagged release, with the files that packing makes.

        ``other`` has files that are not as in the repository.
        """
        files: dict[str, str | bytes] = {}
        for name in self.git("ls-tree", "-r", "--name-only", f"v{version}").splitlines():
            if not name.startswith(".github/"):
                files[name] = self.blob(f"v{version}:{name}")
        files |= other or {}
        files |= generated(version, self.git("rev-parse", f"v{version}"))
        path = self.folder.parent / f"demo-{version}.tar.gz"
        make_sdist(path, files, top=f"demo-{version}")
        return path.read_bytes()

    def archives(self, version: str) -> dict[str, bytes]:
        """Return a release's files as an index has them; nobody looks into these wheels."""
        wheels = {
            f"demo-{version}-cp38-abi3-manylinux_2_28_{arch}.whl": f"{version} {arch}".encode()
            for arch in PLATFORMS
        }
        return {f"demo-{version}.tar.gz": self.sdist(version), **wheels}


def generated(version: str, commit: str) -> dict[str, str | bytes]:
    """Return the files that packing an sdist makes."""
    info = f"Metadata-Version: 2.4\nName: demo\nVersion: {version}\n"
    return {
        "PKG-INFO": info,
        "demo.egg-info/PKG-INFO": info,
        "demo/_version.py": f"__version__ = version = '{version}'\n__commit_id__ = 'g{commit[:9]}'\n",
    }


def index_of(server: IndexServer) -> PackageIndex:
    """Return the sources of somebody whose only one is ``server``."""
    return PackageIndex(PipConfig(index_url=server.index, timeout=5.0, retries=0), backoff=0)


def pin_git(project: Project, url: str) -> None:
    """Let the pin of the project name another git address."""
    path = project.workspace.pin_file("demo")
    path.write_text(path.read_text().replace("https://example.invalid/demo.git", url))
