"""A small stack repository with one target, for tests: real archives, real git."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_stack.base import Base
from vllm_stack.cli import main
from vllm_stack.hashing import sha256_bytes
from vllm_stack.pins import load_pin
from vllm_stack.stack import Stack
from vllm_stack.workspace import Workspace

if TYPE_CHECKING:
    import pytest

#: `ci/test` runs the whole suite a second time with this set to "hostile".
GIT_CONFIGURATION = os.environ.get("VLLM_STACK_TEST_GIT", "plain")

CORE = "".join(f"def function_{n}():\n    return {n}\n\n\n" for n in range(12))
FILES: dict[str, str] = {
    "demo/__init__.py": '"""Demo package."""\n',
    "demo/core.py": CORE,
    "demo/other.py": "VALUE = 1\n",
    "demo/_custom_ops.py": "import demo\n",
    "csrc/kernel.cu": "// kernel\n",
    "tests/test_core.py": "def test_core():\n    pass\n",
    "setup.py": "from setuptools import setup\n\nsetup()\n",
    # Upstream may carry attributes; they must not change what is imported.
    ".gitattributes": "*.py text eol=crlf\n",
}
GENERATED = {
    "PKG-INFO": "Metadata-Version: 2.4\n",
    "demo.egg-info/PKG-INFO": "x\n",
    "demo/_version.py": "version = '1.0.0'\n",
}
IDENTITY = ("Contributor", "contributor@example.invalid")


def make_sdist(path: Path, files: dict[str, str | bytes], top: str = "demo-1.0.0") -> None:
    """Write a source archive with the given files."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))


def message(
    subject: str, *, topic: str = "demo-topic", reason: str = "It is needed.", **trailers: str
) -> str:
    """Return a commit message with all trailers; a keyword replaces one (``_`` stands for ``-``)."""
    values = {
        "Topic": topic,
        "Upstream-Status": "Pending",
        "Drop-When": "upstream does the same",
        "Why-Not-Plugin": "there is no hook for it",
        "Signed-off-by": f"{IDENTITY[0]} <{IDENTITY[1]}>",
    }
    values.update({key.replace("_", "-"): value for key, value in trailers.items()})
    lines = "\n".join(f"{key}: {value}" for key, value in values.items() if value)
    return f"{subject}\n\n{reason}\n\n{lines}\n"


@dataclass(frozen=True)
class Completed:
    """What a command of the tool did."""

    code: int
    report: dict[str, Any]
    out: str
    err: str

    @property
    def error(self) -> dict[str, Any]:
        """The error in the report."""
        error: dict[str, Any] = self.report["error"]
        return error


@dataclass
class Project:
    """A stack repository with one target, ``demo`` 1.0.0."""

    root: Path
    capsys: pytest.CaptureFixture[str]
    files: dict[str, str] = field(default_factory=lambda: dict(FILES))

    def __post_init__(self) -> None:
        (self.root / "upstream").mkdir(parents=True)
        (self.root / "patch-stack" / "demo").mkdir(parents=True)
        self.sdist = self.root / "demo-1.0.0.tar.gz"
        make_sdist(self.sdist, {**self.files, **GENERATED})
        data = self.sdist.read_bytes()
        (self.root / "upstream" / "demo.toml").write_text(self.pin_text(sha256_bytes(data), len(data)))
        self.series.write_text(
            textwrap.dedent("""\
            # The order of the demo stack.
            schema = 1

            [[topics]]
            name = "demo-topic"
            numbers = [100, 199]
            title = "Demo"

            [[topics]]
            name = "second"
            numbers = [200, 209]
            title = "Second"
            """)
        )
        self.base = Base.ensure(self.workspace, load_pin(self.workspace.pin_file("demo")), self.sdist)

    @staticmethod
    def pin_text(sha256: str, size: int) -> str:
        """Return a valid pin of the demo target."""
        wheel = "demo-1.0.0-cp38-abi3-manylinux_2_28_x86_64.whl"
        return (
            'schema = 1\ndistribution = "demo"\nrelease = "1.0.0"\ngit = "https://example.invalid/demo.git"\n'
            f'tag = "v1.0.0"\n[sdist]\nfilename = "demo-1.0.0.tar.gz"\nsha256 = "{sha256}"\nsize = {size}\n'
            f'[[wheels]]\narch = "x86_64"\nfilename = "{wheel}"\nsha256 = "{"0" * 64}"\nsize = 1\n'
            '[layout]\npackage = "demo"\nnative = ["csrc/", "setup.py", "demo/_custom_ops.py"]\n'
            'generated = ["demo.egg-info/", "PKG-INFO", "demo/_version.py"]\n'
            'version_file = "demo/_version.py"\n'
        )

    @property
    def workspace(self) -> Workspace:
        """The folders of this project."""
        return Workspace.locate(self.root, self.root / "cache")

    @property
    def series(self) -> Path:
        """The series file."""
        return self.root / "patch-stack" / "demo" / "series.toml"

    @property
    def checkout(self) -> Path:
        """The working checkout."""
        return self.root / "upstream" / "demo"

    @property
    def stack(self) -> Stack:
        """The stack as it is on disk."""
        return Stack.load(self.workspace, "demo")

    def patch_file(self, name: str) -> Path:
        """Return the path of a patch file."""
        return self.series.parent / name

    def patches(self) -> dict[str, bytes]:
        """Return all files of the stack's folder with their bytes."""
        return {path.name: path.read_bytes() for path in sorted(self.series.parent.glob("*.*"))}

    def run(self, *words: str) -> Completed:
        """Run the command line in this process, on this project."""
        report = self.root / "report.json"
        report.unlink(missing_ok=True)
        if GIT_CONFIGURATION == "hostile":
            self._spoil_repositories()
        self.capsys.readouterr()
        common = ["--root", str(self.root), "--cache-dir", str(self.root / "cache"), "--json", str(report)]
        code = 0
        try:
            main([*words, *common])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = self.capsys.readouterr()
        document = json.loads(report.read_text()) if report.exists() else {}
        return Completed(code, document, out, err)

    def ok(self, *words: str) -> Completed:
        """Run a command that has to succeed."""
        done = self.run(*words)
        assert done.code == 0, done.err
        return done

    def _spoil_repositories(self) -> None:
        """Under the hostile configuration, put it into the repositories' own files too."""
        hostile = Path(os.environ["HOME"]) / ".gitconfig"
        for config in (
            *self.root.glob("upstream/*/.git/config"),
            *self.root.glob("cache/bases/*.git/config"),
            *self.root.glob("cache/clones/*.git/config"),
            *self.root.glob(".vllm-stack/*/repo.git/config"),
        ):
            if "# spoilt" not in config.read_text():
                config.write_text(f"{config.read_text()}# spoilt\n{hostile.read_text()}")

    def git(self, *words: str, stdin: str = "", cwd: Path | None = None) -> str:
        """Run git in the checkout (or ``cwd``) as a person would: their configuration, no hooks."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        name, email = IDENTITY
        settings = ["-c", f"user.name={name}", "-c", f"user.email={email}", "-c", "core.hooksPath=/dev/null"]
        settings += ["-c", "core.editor=true", "-c", "sequence.editor=true", "-c", "commit.verbose=false"]
        settings += [
            "-c",
            "commit.cleanup=verbatim",
            "-c",
            "core.safecrlf=false",
            "-c",
            "color.ui=false",
            "-c",
            "i18n.commitEncoding=UTF-8",
        ]
        done = subprocess.run(
            ["git", *settings, *words],
            cwd=cwd or self.checkout,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"git {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text in a file of the checkout."""
        file = self.checkout / path
        text = file.read_bytes().decode()
        assert old in text
        file.write_bytes(text.replace(old, new, 1).encode())

    def write(self, path: str, text: str) -> None:
        """Write a file of the checkout."""
        file = self.checkout / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())

    def commit(self, text: str) -> str:
        """Commit everything in the checkout and return the commit's id."""
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--file=-", stdin=text)
        return self.git("rev-parse", "HEAD").strip()

    def add_patches(self) -> list[str]:
        """Make a stack of three patches and return their names."""
        self.ok("apply")
        self.edit("demo/core.py", "return 1\n", "return 100\n")
        self.commit(message("[Core] Return a hundred"))
        self.write("demo/new.py", "NEW = True\n")
        self.edit("tests/test_core.py", "pass", "assert True")
        self.commit(message("[Core][New] Add a module"))
        self.edit("demo/core.py", "return 9\n", "return 900\n")
        self.commit(message("[Second] Return nine hundred", topic="second"))
        self.ok("refresh")
        return [patch.name for patch in self.stack.patches]


def make_target(project: Project, name: str) -> None:
    """Add a second target to the project, with the pin and the patches of the first."""
    shutil.copy(project.workspace.pin_file("demo"), project.workspace.pin_file(name))
    shutil.copytree(project.series.parent, project.root / "patch-stack" / name)
