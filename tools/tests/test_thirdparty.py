"""What releases pin of others: read by the grammar of each file, never from comments."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from stackproject import FILES, GENERATED, Project, make_sdist

from vllm_stack.base import Base
from vllm_stack.cmake import CMakeSyntaxError, assignments, expand, parse_cmake
from vllm_stack.hashing import sha256_bytes
from vllm_stack.pins import PinnedFile
from vllm_stack.thirdparty import ThirdPartyChange, compare_third_party, render_third_party, third_party_pins

if TYPE_CHECKING:
    from vllm_stack.thirdparty import ThirdPartyReport

CMAKE = """\
include(FetchContent)
# GIT_TAG commented-out
#[[ FetchContent_Declare(never GIT_REPOSITORY https://h/never GIT_TAG v9) ]]
set(KERNELS_TAG "v1.5") # set(KERNELS_TAG "v0")
FetchContent_Declare(
    kernels # GIT_TAG v7
    GIT_REPOSITORY https://h/kernels.git
    # GIT_TAG v8
    GIT_TAG ${KERNELS_TAG}
)
if(DEFINED ENV{LOCAL})
  SET(OTHER_TAG $ENV{LOCAL})
else()
  set(OTHER_TAG
      "abc" CACHE STRING "the tag (of \\"other\\")")
endif()
ExternalProject_Add(other GIT_REPOSITORY "https://h/other" GIT_TAG "${OTHER_TAG}" PATCH_COMMAND [=[a ) b]=])
FetchContent_Populate(archive URL https://h/a.tar.gz URL_HASH SHA256=${SUM})
FetchContent_Declare(local SOURCE_DIR ${HERE})
set(TORCH_SUPPORTED_VERSION "2.14.0")
set(CUDA_SUPPORTED_ARCHS 8.0 "9.0;12.0")
set(AMX_SUPPORTED TRUE)
message(STATUS "GIT_TAG v6")
"""
REQUIREMENTS = """\
-r common.txt
--extra-index-url https://h/simple
# torch==1.0
torch == 2.14.0   # was torch==2.13.0
flashinfer-python[cu13, cu12]==0.7.2; platform_system == "Linux"
Many_Markers==1 ; python_version < "3.12"
many-markers==2 ; python_version >= "3.12"
hashed==1.0 \\
    --hash=sha256:abc \\
    --hash=sha256:def
direct @ https://h/direct-1.whl#sha256=1 ; platform_machine == "x86_64"
git+https://h/tool.git@v3
plain
"""


def base_of(project: Project, release: str, files: dict[str, str | bytes]) -> Base:
    path = project.root / f"demo-{release}.tar.gz"
    make_sdist(path, {**FILES, **GENERATED, **files}, top=f"demo-{release}")
    data = path.read_bytes()
    sdist = PinnedFile(filename=path.name, sha256=sha256_bytes(data), size=len(data))
    pin = project.stack.pin.model_copy(update={"release": release, "sdist": sdist})
    return Base.ensure(project.workspace, pin, path)


def pins_of(project: Project, file: str, text: str) -> dict[str, str]:
    base = base_of(project, "9.0", {file: text})
    found, unread = third_party_pins(base.git, base.commit)
    assert unread == []
    return {name: value for (_, name, at), value in found.items() if at == file}


def compare(project: Project, old: dict[str, str | bytes], new: dict[str, str | bytes]) -> ThirdPartyReport:
    return compare_third_party(base_of(project, "1.1", old), base_of(project, "1.2", new))


# -- the files


@pytest.mark.parametrize("file", ["CMakeLists.txt", "cmake/external_projects/all.cmake"])
def test_fetched_projects(project: Project, file: str) -> None:
    assert pins_of(project, file, CMAKE) == {
        "kernels": "v1.5",
        "kernels repository": "https://h/kernels.git",
        "other": "abc",
        "other repository": "https://h/other",
        "archive archive": "https://h/a.tar.gz",
        "TORCH_SUPPORTED_VERSION": "2.14.0",
        "CUDA_SUPPORTED_ARCHS": "8.0;9.0;12.0",
    }


def test_a_tag_that_depends_on_a_branch_of_the_build_has_all_values(project: Project) -> None:
    text = "if(A)\nset(T x)\nelse()\nset(T ${U}-y)\nset(U z)\nendif()\nFetchContent_Declare(p GIT_TAG ${T})\n"
    assert pins_of(project, "CMakeLists.txt", text) == {"p": "x or z-y"}


def test_requirements(project: Project) -> None:
    assert pins_of(project, "requirements/cuda.txt", REQUIREMENTS) == {
        "torch": "==2.14.0",
        "flashinfer-python": '[cu12,cu13]==0.7.2; platform_system == "Linux"',
        "many-markers": '==1; python_version < "3.12" or ==2; python_version >= "3.12"',
        "hashed": "==1.0",
        "direct": '@ https://h/direct-1.whl#sha256=1; platform_machine == "x86_64"',
        "git+https://h/tool.git": "v3",
        "plain": "any",
    }


@pytest.mark.parametrize("file", ["requirements/test/cuda.txt", "requirements/docs.txt", "other/cuda.txt"])
def test_what_no_user_installs_is_left_out(project: Project, file: str) -> None:
    assert pins_of(project, file, REQUIREMENTS) == {}


def test_project_files(project: Project) -> None:
    text = (
        '[build-system]\nrequires = ["torch == 2.14.0", # "torch == 1"\n "wheel"]\n[project]\n'
        'dependencies = ["gguf>=0.19"]\nrequires-python = ">=3.11"\n'
        '[project.optional-dependencies]\nextra = ["b12x==1.5.1"]\n'
    )
    assert pins_of(project, "pyproject.toml", text) == {
        "torch": "==2.14.0",
        "wheel": "any",
        "gguf": ">=0.19",
        "requires-python": ">=3.11",
        "b12x": "==1.5.1",
    }
    setup = (
        'from setuptools import setup\nX = ["no==1"]\n'
        'setup(extras_require={"a": ["yes==2"], "b": X}, install_requires=X)\n'
    )
    assert pins_of(project, "setup.py", setup) == {"yes": "==2"}
    assert pins_of(project, "rust-toolchain.toml", '[toolchain]\nchannel = "1.95"\n') == {"rust": "1.95"}


def test_build_arguments(project: Project) -> None:
    text = (
        "ARG CUDA_VERSION=13.0.3\n# ARG NCCL_VERSION=1\nARG PATHS=/x DEEPEP_COMMIT_HASH=d4f4\n"
        'ARG EMPTY_VERSION=""\nARG NCCL_VERSION\nENV TOOL_VERSION=3\n'
        "RUN echo a \\\n# a comment in between\n  && echo 'ARG NO_VERSION=1'\n"
        'ARG \\\n  TIMM_VERSION=">=1.0 <2"\n'
    )
    assert pins_of(project, "docker/Dockerfile", text) == {
        "CUDA_VERSION": "13.0.3",
        "DEEPEP_COMMIT_HASH": "d4f4",
        "TIMM_VERSION": ">=1.0 <2",
    }
    assert pins_of(project, "docker/Dockerfile.rocm", text) == {}


# -- the comparison


def test_changes_are_named_with_their_file(project: Project) -> None:
    old: dict[str, str | bytes] = {
        "CMakeLists.txt": CMAKE,
        "requirements/cuda.txt": "torch==2.13.0\nold==1\nsame==1\n",
    }
    new: dict[str, str | bytes] = {
        "CMakeLists.txt": CMAKE.replace('"v1.5")', '"v1.6")').replace("# GIT_TAG v8", "# GIT_TAG v88"),
        "requirements/cuda.txt": "# moved\nsame==1\ntorch==2.14.0\nnew\n",
    }
    report = compare(project, old, new)
    assert report.unread == ()
    assert report.changes == (
        ThirdPartyChange("build", "kernels", "v1.5", "v1.6", "CMakeLists.txt"),
        ThirdPartyChange("python", "new", None, "any", "requirements/cuda.txt"),
        ThirdPartyChange("python", "old", "==1", None, "requirements/cuda.txt"),
        ThirdPartyChange("python", "torch", "==2.13.0", "==2.14.0", "requirements/cuda.txt"),
    )
    assert compare(project, new, new).changes == ()
    shown = io.StringIO()
    render_third_party(Console(file=shown, width=100), report)
    assert shown.getvalue() == (
        "what upstream pins of others:\n"
        "  CMakeLists.txt\n    kernels: v1.5 -> v1.6\n"
        "  requirements/cuda.txt\n    new: new, any\n    old: ==1, gone\n    torch: ==2.13.0 -> ==2.14.0\n"
    )


def test_files_that_cannot_be_read_are_named(project: Project) -> None:
    broken: dict[str, str | bytes] = {
        "CMakeLists.txt": "set(A b\n",
        "pyproject.toml": "[project\n",
        "setup.py": "def\n",
        "requirements/cuda.txt": b"\xff\n",
        "requirements/common.txt": "torch==1\n",
    }
    report = compare(project, {}, broken)
    assert [change.name for change in report.changes] == ["torch"]
    named = [line.partition(": ")[2].partition(":")[0] for line in report.unread]
    assert named == ["CMakeLists.txt", "pyproject.toml", "requirements/cuda.txt", "setup.py"]


# -- CMake's grammar


def arguments(text: str) -> list[tuple[str, ...]]:
    return [command.arguments for command in parse_cmake(text, source="x.cmake")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a()", [()]),
        ("a(b c)\nD ( e )", [("b", "c"), ("e",)]),
        ('a("b c" "d\\"e" "f\\\ng")', [("b c", 'd"e', "fg")]),
        ('a([[b ) # " ]] [==[c]]d]==])', [('b ) # " ', "c]]d")]),
        ("a(b#c\n)", [("b",)]),
        ("a(b #[[ ( ]] c)", [("b", "c")]),
        ("if((A AND B) OR NOT C)\nendif()", [("(", "A", "AND", "B", ")", "OR", "NOT", "C"), ()]),
        ('a(-DX="y z" k\\ l)', [('-DX="y z"', "k l")]),
        ("", []),
    ],
)
def test_the_grammar(text: str, expected: list[tuple[str, ...]]) -> None:
    assert arguments(text) == expected


@pytest.mark.parametrize("text", ["a(", "a", "a)", '"a"()', 'a("b)', "a()\n)", "a(b\n\n"])
def test_what_is_no_cmake_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(CMakeSyntaxError, match=r"x\.cmake:\d+: "):
        parse_cmake(text, source="x.cmake")


def test_lines_are_counted() -> None:
    text = 'a()\n#[[\n\n]]\nb(\n  "c\n" )\nd()\n'
    assert [(command.name, command.line) for command in parse_cmake(text, source="x")] == [
        ("a", 1),
        ("b", 5),
        ("d", 8),
    ]


def test_variables_that_hold_each_other_end() -> None:
    values = assignments(parse_cmake("set(A ${B})\nset(B ${A})\nset(C ${C}x y)", source="x"))
    assert expand("${A}", values) == ()
    assert expand("${C}", values) == ()
    assert expand("plain $ENV{X}", values) == ()
    assert expand("v${D}", {"D": ("1", "2", "1")}) == ("v1", "v2")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='ab()"#[]=\\\n ${}', max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(CMakeSyntaxError):
        assert all(command.line > 0 for command in parse_cmake(text, source="x.cmake"))
