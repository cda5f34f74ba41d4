"""What a release pins of others: sources that its build fetches, Python packages, the image's parts, tools.

The overlay wheel takes compiled parts from the official one, so that a changed pin needs nothing by itself; a
patch that calls into such a project may have to change with it.
"""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from vllm_stack.classify import matches
from vllm_stack.cmake import Command, assignments, expand, parse_cmake
from vllm_stack.errors import StackError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from vllm_stack.base import Base
    from vllm_stack.git import Git

Kind = Literal["build", "python", "docker", "tool"]
#: Commands that fetch a project, each with the name of it as its first argument.
_FETCHING = ("fetchcontent_declare", "fetchcontent_populate", "externalproject_add")
#: Words in the name of a build argument that tell that its value chooses something.
_CHOOSING = frozenset({"VERSION", "COMMIT", "TAG", "HASH", "REVISION", "IMAGE", "BRANCH", "REF", "SHA256"})
#: What developers of upstream's install: no user has it.
_NOT_SHIPPED = (
    "requirements/test/",
    "requirements/docs.txt",
    "requirements/lint.txt",
    "requirements/dev.txt",
)


@dataclass(frozen=True)
class ThirdPartyPin:
    """One thing that a file of a release pins."""

    kind: Kind
    name: str
    value: str
    file: str


@dataclass(frozen=True)
class ThirdPartyChange:
    """What became of a pin between two releases."""

    kind: Kind
    name: str
    old: str | None
    """None where it is new; several values, of branches of the build, are joined by ``or``."""
    new: str | None
    """None where it is gone."""
    file: str


@dataclass(frozen=True)
class ThirdPartyReport:
    """How the pins of two releases differ."""

    changes: tuple[ThirdPartyChange, ...]
    unread: tuple[str, ...]
    """Files, with the reason, whose pins could not be read."""


def compare_third_party(old: Base, new: Base) -> ThirdPartyReport:
    """Compare what two releases pin. A file that cannot be read is named, never passed over."""
    before, first = third_party_pins(old.git, old.commit)
    after, second = third_party_pins(new.git, new.commit)
    unread = [f"{old.commit[:12]}: {text}" for text in first] + [
        f"{new.commit[:12]}: {text}" for text in second
    ]
    changes = [
        ThirdPartyChange(kind, name, before.get((kind, name, file)), after.get((kind, name, file)), file)
        for kind, name, file in sorted(before.keys() | after.keys(), key=_order)
        if before.get((kind, name, file)) != after.get((kind, name, file))
    ]
    return ThirdPartyReport(tuple(changes), tuple(unread))


_Key = tuple[Kind, str, str]


def _order(key: _Key) -> tuple[int, str, str]:
    kind, name, file = key
    return ("build", "python", "docker", "tool").index(kind), file, name


def third_party_pins(git: Git, commit: str) -> tuple[dict[_Key, str], list[str]]:
    """Return the pins of a release by kind, name and file, and what could not be read."""
    paths = git.run("ls-tree", "-r", "-z", "--name-only", commit).fields
    readers = {path: reader for path in paths if (reader := _reader(path)) is not None}
    values: dict[_Key, dict[str, None]] = {}
    unread: list[str] = []
    for path, data in git.blobs(commit, list(readers)).items():
        try:
            for pin in readers[path](data.decode("utf-8"), path):
                values.setdefault((pin.kind, pin.name, pin.file), {})[pin.value] = None
        except (StackError, ValueError, SyntaxError) as error:
            unread.append(f"{path}: {error}")
    return {key: " or ".join(found) for key, found in values.items()}, unread


_Reader: TypeAlias = "Callable[[str, str], Iterator[ThirdPartyPin]]"


def _reader(path: str) -> _Reader | None:
    """Return what reads the pins of a file; None for one that has none."""
    if path == "CMakeLists.txt" or (path.startswith("cmake/") and path.endswith(".cmake")):
        return _cmake_pins
    if path.startswith("requirements/") and path.endswith(".txt"):
        return None if matches(path, _NOT_SHIPPED) else _requirements
    named: dict[str, _Reader] = {
        # Of the image for NVIDIA's GPUs; the others have nothing to do with our wheels.
        "docker/Dockerfile": _dockerfile,
        "pyproject.toml": _pyproject,
        "rust-toolchain.toml": _rust,
        "setup.py": _setup,
    }
    return named.get(path)


# -- CMake


def _cmake_pins(text: str, file: str) -> Iterator[ThirdPartyPin]:
    commands = parse_cmake(text, source=file)
    values = assignments(commands)
    for command in commands:
        if command.name in _FETCHING and command.arguments:
            yield from _fetched(command, values, file)
    for name, found in values.items():
        # e.g. TORCH_SUPPORTED_VERSION_CUDA, CUDA_SUPPORTED_ARCHS
        if _supported(name):
            yield from (
                ThirdPartyPin("build", name, value, file) for raw in found for value in expand(raw, values)
            )


def _supported(name: str) -> bool:
    words = set(name.split("_"))
    return "SUPPORTED" in words and not words.isdisjoint({"VERSION", "VERSIONS", "ARCHS"})


def _fetched(command: Command, values: dict[str, tuple[str, ...]], file: str) -> Iterator[ThirdPartyPin]:
    project, *options = command.arguments
    following = dict(itertools.pairwise(options))
    for option, what in (
        ("GIT_TAG", ""),
        ("GIT_REPOSITORY", " repository"),
        ("URL", " archive"),
        ("URL_HASH", " hash"),
    ):
        for value in expand(following[option], values) if option in following else ():
            yield ThirdPartyPin("build", project + what, value, file)


# -- Python


def _requirements(text: str, file: str) -> Iterator[ThirdPartyPin]:
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in joined.splitlines():
        # As pip: a comment begins a line or follows white space.
        requirement = re.sub(r"(^|\s)#.*$", "", line).strip()
        if requirement and not requirement.startswith("-"):
            yield _requirement(re.split(r"\s--(?=[a-z])", requirement)[0], file)


def _requirement(text: str, file: str) -> ThirdPartyPin:
    try:
        parsed = Requirement(text)
    except InvalidRequirement:
        # pip also takes a bare address, which may end in a revision.
        address, at, revision = text.partition(";")[0].strip().rpartition("@")
        if at and "://" in address:
            return ThirdPartyPin("python", address, revision, file)
        return ThirdPartyPin("python", text, "as it stands", file)
    extras = f"[{','.join(sorted(parsed.extras))}]" if parsed.extras else ""
    value = f"@ {parsed.url}" if parsed.url else str(parsed.specifier)
    marker = f"; {parsed.marker}" if parsed.marker else ""
    return ThirdPartyPin("python", canonicalize_name(parsed.name), f"{extras}{value}{marker}" or "any", file)


def _pyproject(text: str, file: str) -> Iterator[ThirdPartyPin]:
    document = tomllib.loads(text)
    project = document.get("project", {})
    groups = [document.get("build-system", {}).get("requires", []), project.get("dependencies", [])]
    for requirements in (*groups, *project.get("optional-dependencies", {}).values()):
        yield from (_requirement(requirement, file) for requirement in requirements)
    if "requires-python" in project:
        yield ThirdPartyPin("python", "requires-python", project["requires-python"], file)


def _setup(text: str, file: str) -> Iterator[ThirdPartyPin]:
    """Yield what the call of ``setup`` writes out; what it computes is in the files that it reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setup":
            for keyword in node.keywords:
                if keyword.arg in ("extras_require", "install_requires", "setup_requires"):
                    yield from (_requirement(written, file) for written in _texts(keyword.value))


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the texts of a list, or of the lists that a dictionary holds."""
    if isinstance(node, ast.Dict):
        for value in node.values:
            yield from _texts(value)
    elif isinstance(node, (ast.List, ast.Tuple)):
        yield from (
            item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)
        )


# -- images and tools


def _dockerfile(text: str, file: str) -> Iterator[ThirdPartyPin]:
    without_comments = re.sub(r"(?m)^[ \t]*#.*\n?", "", text)
    for line in re.sub(r"\\[ \t]*\r?\n", " ", without_comments).splitlines():
        words = re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", line)
        if words and words[0].upper() == "ARG":
            for name, equals, value in (word.partition("=") for word in words[1:]):
                chosen = value.strip("\"'")
                if equals and chosen and _chooses(name):
                    yield ThirdPartyPin("docker", name, chosen, file)


def _chooses(name: str) -> bool:
    return not _CHOOSING.isdisjoint(name.upper().split("_"))


def _rust(text: str, file: str) -> Iterator[ThirdPartyPin]:
    channel = tomllib.loads(text).get("toolchain", {}).get("channel")
    if channel:
        yield ThirdPartyPin("tool", "rust", str(channel), file)


# -- for people


def render_third_party(console: Console, report: ThirdPartyReport) -> None:
    """Print the changes, file by file; nothing where there are none."""
    from rich.markup import escape  # noqa: PLC0415 - only where something is printed

    if report.changes or report.unread:
        console.print("what upstream pins of others:")
    for file in dict.fromkeys(change.file for change in report.changes):
        console.print(f"  [bold]{escape(file)}[/bold]")
        for change in (change for change in report.changes if change.file == file):
            console.print(f"    {change.name}: {_step(change)}", markup=False)
    for line in report.unread:
        console.print(f"  not read: {line}", markup=False)


def _step(change: ThirdPartyChange) -> str:
    if change.old is None:
        return f"new, {change.new}"
    return f"{change.old}, gone" if change.new is None else f"{change.old} -> {change.new}"
