"""Finding the release that a stack is to be moved to: from an index, an archive, a folder."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tomllib
from typing import TYPE_CHECKING

import pytest
from indexserver import Answer, IndexServer, serve
from stackproject import FILES, GENERATED, Project, make_sdist
from upstreamrepo import generated, index_of
from wheelkit import BUILT, INFO, SOURCES, make_wheel

from vllm_stack.errors import IntegrityError, NetworkError, UsageError
from vllm_stack.index import PackageIndex
from vllm_stack.pins import parse_pin
from vllm_stack.pip_config import PipConfig
from vllm_stack.releases import Candidate, find_candidate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

COMMIT = "0123abcd9" + "0" * 31


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with serve() as running:
        running.style, running.sizes = "json", True
        yield running


def sdist_bytes(folder: Path, version: str, files: Mapping[str, str | bytes] | None = None) -> bytes:
    path = folder / f"made-{version}.tar.gz"
    content = {**(FILES if files is None else files), **generated(version, COMMIT)}
    make_sdist(path, content, top=f"demo-{version}")
    return path.read_bytes()


def offer(server: IndexServer, folder: Path, version: str, *arches: str) -> bytes:
    """Let the index have a release, and return its sdist."""
    sdist = sdist_bytes(folder, version)
    server.files[f"demo-{version}.tar.gz"] = sdist
    for arch in arches or ("x86_64",):
        server.files[f"demo-{version}-cp38-abi3-manylinux_2_28_{arch}.whl"] = f"{version} {arch}".encode()
    return sdist


def find(project: Project, server: IndexServer, wanted: str, *, offline: bool = False) -> Candidate:
    return find_candidate(project.workspace, "demo", wanted, offline=offline, index=index_of(server))


def files_of(candidate: Candidate) -> dict[str, bytes]:
    git, commit = candidate.base.git, candidate.base.commit
    return git.blobs(commit, git.run("ls-tree", "-r", "-z", "--name-only", commit).fields)


# -- releases of an index


def test_a_version_gives_its_pin_and_its_base(project: Project, server: IndexServer, tmp_path: Path) -> None:
    sdist = offer(server, tmp_path, "1.1.0", "x86_64", "aarch64")
    found = find(project, server, "1.1.0")
    assert (found.release, found.source, found.complete, found.notes) == ("1.1.0", "index", True, ())
    assert found.pin.sdist.sha256 == hashlib.sha256(sdist).hexdigest()
    assert [(wheel.arch, wheel.size) for wheel in found.pin.wheels] == [("x86_64", len("1.1.0 x86_64"))]
    assert (found.pin.tag, found.pin.commit) == ("v1.1.0", "0123abcd9")
    assert parse_pin(found.pin_text, source="text") == found.pin
    assert files_of(found) == {name: text.encode() for name, text in FILES.items()}
    found.require_complete()


def test_the_text_keeps_comments_and_layout(project: Project, server: IndexServer, tmp_path: Path) -> None:
    pin = project.workspace.pin_file("demo")
    pin.write_text("# Ours.\n" + pin.read_text().replace("[layout]", "\n# By hand.\n[layout] # kept"))
    before = pin.read_text()
    offer(server, tmp_path, "1.1.0")
    found = find(project, server, "1.1.0")
    changed = [
        (old, new)
        for old, new in zip(before.splitlines(), found.pin_text.splitlines(), strict=False)
        if old != new
    ]
    assert found.pin_text.startswith("# Ours.\n")
    assert "\n# By hand.\n[layout] # kept\n" in found.pin_text
    assert pin.read_text() == before
    assert ('release = "1.0.0"', 'release = "1.1.0"') in changed


def test_a_commit_that_is_not_known_leaves_with_its_comment(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    pin = project.workspace.pin_file("demo")
    pin.write_text(
        pin.read_text().replace('tag = "v1.0.0"\n', 'tag = "v1.0.0"\n# Why\n# so.\ncommit = "abcdef0"\n')
    )
    offer(server, tmp_path, "1.1.0")
    content: dict[str, str | bytes] = {**FILES, **GENERATED, "PKG-INFO": "Name: demo\nVersion: 1.1.0\n"}
    make_sdist(tmp_path / "plain.tar.gz", content, top="demo-1.1.0")
    server.files["demo-1.1.0.tar.gz"] = (tmp_path / "plain.tar.gz").read_bytes()
    found = find(project, server, "1.1.0")
    assert found.pin.commit is None
    assert 'tag = "v1.1.0"\n[sdist]\n' in found.pin_text


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("1.1.0", "1.10.0", "1.9.0"), "1.10.0"),
        (("1.1.0", "1.2.0rc1", "1.2.0.dev3"), "1.1.0"),
        (("1.1.0", "1.1.0.post1"), "1.1.0.post1"),
    ],
)
def test_latest_is_the_newest_final_release(
    project: Project, server: IndexServer, tmp_path: Path, versions: tuple[str, ...], expected: str
) -> None:
    for version in versions:
        offer(server, tmp_path, version)
    assert find(project, server, "latest").release == expected


def test_latest_passes_over_a_yanked_release(project: Project, server: IndexServer, tmp_path: Path) -> None:
    for version in ("1.1.0", "1.2.0"):
        offer(server, tmp_path, version)
    server.yanked = {name: "broken" for name in server.files if "1.2.0" in name}
    assert find(project, server, "latest").release == "1.1.0"
    yanked = find(project, server, "1.2.0")
    assert yanked.lacks == ("1.2.0 was yanked by its authors: broken",)
    with pytest.raises(UsageError, match="cannot become the pin") as caught:
        yanked.require_complete()
    assert caught.value.details == yanked.lacks


def test_html_pages_with_yanked_files_are_understood(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    server.style = "html"
    offer(server, tmp_path, "1.1.0")
    offer(server, tmp_path, "1.2.0")
    server.yanked = {name: "" for name in server.files if "1.2.0" in name}
    assert find(project, server, "latest").pin.wheels[0].size == len("1.1.0 x86_64")
    assert find(project, server, "1.2.0").lacks == ("1.2.0 was yanked by its authors: no reason is given",)


def test_the_present_release_is_the_present_pin(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    found = find(project, server, "1.0.0")
    assert found.pin_text == project.workspace.pin_file("demo").read_text()
    assert found.base == project.base
    assert server.requests == []


def test_a_version_that_does_not_exist_is_answered_with_its_neighbours(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    for version in ("0.8.0", "0.9.0", "1.1.0", "1.2.0", "1.4.0", "1.5.0", "2.0.0"):
        offer(server, tmp_path, version)
    with pytest.raises(UsageError, match=r"no demo 1\.3\.0 in the package sources") as caught:
        find(project, server, "1.3.0")
    assert caught.value.hint == "there are 1.1.0, 1.2.0, 1.4.0, 1.5.0, 2.0.0"


def test_a_source_that_does_not_answer_may_have_it(project: Project, server: IndexServer) -> None:
    server.page_statuses = [503, 503]
    server.files["demo-1.1.0.tar.gz"] = b""
    for wanted in ("latest", "1.2.0"):
        with pytest.raises(NetworkError):
            find(project, server, wanted)
    # Of several sources one failed: there may be a newer release than what the others list.
    server.page_statuses = [503]
    config = PipConfig(index_url=server.index, extra_index_urls=(server.index,), retries=0, timeout=5.0)
    with pytest.raises(NetworkError, match="cannot tell the latest demo"):
        find_candidate(project.workspace, "demo", "latest", index=PackageIndex(config, backoff=0))


def test_only_wheels_is_said(project: Project, server: IndexServer) -> None:
    wheel = "demo-1.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    server.files[wheel] = b"x"
    with pytest.raises(NetworkError, match=r"has no source archive") as caught:
        find(project, server, "1.1.0")
    assert caught.value.details == (f"there is {wheel}",)


def test_only_an_sdist_can_be_tried_but_not_pinned(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    server.files["demo-1.1.0.tar.gz"] = sdist_bytes(tmp_path, "1.1.0")
    found = find(project, server, "1.1.0")
    assert found.lacks == ("demo 1.1.0 has no Linux wheel for x86_64: only its sdist can be used",)
    assert found.pin_text.startswith("# Not a pin")
    assert found.lacks[0] in found.pin_text
    with pytest.raises(UsageError):
        parse_pin(found.pin_text, source="text")


def test_a_missing_architecture_is_named(project: Project, server: IndexServer, tmp_path: Path) -> None:
    pin = project.workspace.pin_file("demo")
    name = "demo-1.0.0-cp38-abi3-manylinux_2_28_aarch64.whl"
    wheel = f'[[wheels]]\narch = "aarch64"\nfilename = "{name}"\nsha256 = "{"1" * 64}"\nsize = 2\n'
    pin.write_text(pin.read_text().replace("[layout]", f"{wheel}[layout]"))
    offer(server, tmp_path, "1.1.0")
    found = find(project, server, "1.1.0")
    assert found.lacks == ("demo 1.1.0 has no Linux wheel for aarch64; there is one for x86_64",)
    offer(server, tmp_path, "1.2.0", "aarch64", "x86_64")
    arches = [wheel["arch"] for wheel in tomllib.loads(find(project, server, "1.2.0").pin_text)["wheels"]]
    assert arches == ["x86_64", "aarch64"]


def test_of_several_wheels_the_one_for_most_systems_is_taken(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    server.files["demo-1.1.0.tar.gz"] = sdist_bytes(tmp_path, "1.1.0")
    for tags in (
        *("cp312-cp312-manylinux2014_x86_64", "cp38-abi3-manylinux_2_31_x86_64", "cp38-abi3-win_amd64"),
        *(
            "cp38-abi3-manylinux_2_28_x86_64",
            "cp38-abi3-musllinux_1_2_x86_64",
            "cp38-abi3-macosx_11_0_x86_64",
        ),
    ):
        server.files[f"demo-1.1.0-{tags}.whl"] = tags.encode()
    assert (
        find(project, server, "1.1.0").pin.wheels[0].filename.endswith("cp38-abi3-manylinux_2_28_x86_64.whl")
    )


@pytest.mark.parametrize("wanted", ["1.1.0+cpu", "nonsense~", "a b", "", "-v", "../1.0", "no/such.tar.gz"])
def test_what_names_nothing_is_a_usage_error(project: Project, server: IndexServer, wanted: str) -> None:
    with pytest.raises(UsageError):
        find_candidate(project.workspace, "demo", wanted, source="sdist", index=index_of(server))


# -- what the index does not say


def test_sizes_are_asked_for(project: Project, server: IndexServer, tmp_path: Path) -> None:
    server.sizes = False
    offer(server, tmp_path, "1.1.0")
    assert find(project, server, "1.1.0").pin.wheels[0].size == len("1.1.0 x86_64")
    assert not any(path.endswith(".whl") and "range" in headers for path, headers in server.requests)


def test_a_size_that_nobody_tells_is_learnt_by_fetching(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    server.sizes = server.heads = False
    offer(server, tmp_path, "1.1.0")
    wheel = find(project, server, "1.1.0").pin.wheels[0]
    assert wheel.size == len("1.1.0 x86_64")
    assert (project.workspace.downloads / wheel.sha256 / wheel.filename).read_bytes() == b"1.1.0 x86_64"


def test_a_file_that_is_cut_off_is_not_learnt(project: Project, server: IndexServer, tmp_path: Path) -> None:
    server.sizes = server.heads = False
    offer(server, tmp_path, "1.1.0")
    server.answers = [Answer(cut=10), Answer(cut=3, framing="chunked")]
    for _ in range(2):
        with pytest.raises(NetworkError, match=r"no package source gave demo-1\.1\.0"):
            find(project, server, "1.1.0")
    assert not list(project.workspace.cache.rglob("*.part"))
    assert find(project, server, "1.1.0").complete


def test_bytes_that_are_not_those_of_the_hash_are_not_kept(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    server.sizes = server.heads = False
    offer(server, tmp_path, "1.1.0")
    server.answers = [Answer(body=b"other bytes")]
    with pytest.raises(IntegrityError, match="with sha256"):
        find(project, server, "1.1.0")
    assert [path for path in project.workspace.downloads.rglob("*") if path.is_file()] == []


def test_hashes_that_no_source_gives_are_learnt_and_said(project: Project, tmp_path: Path) -> None:
    """A folder of find-links has no hashes: what the files say of themselves is all there is."""
    links = tmp_path / "links"
    links.mkdir()
    (links / "demo-1.1.0.tar.gz").write_bytes(sdist_bytes(tmp_path, "1.1.0"))
    wheel = make_wheel_of(links, "1.1.0")
    found = find_candidate(project.workspace, "demo", "latest", index=local_index(links))
    assert found.pin.wheels[0].sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert len(found.notes) == 2
    assert all("no package source gives a hash of demo-1.1.0" in note for note in found.notes)
    # The bytes were kept, verified, so that they need not come again.
    again = find_candidate(project.workspace, "demo", "1.1.0", offline=True, index=local_index(links))
    assert again.pin == found.pin


def make_wheel_of(folder: Path, version: str) -> Path:
    info = {
        **INFO,
        "METADATA": INFO["METADATA"].replace(b"Version: 1.0.0\n", f"Version: {version}\n".encode()),
        "WHEEL": INFO["WHEEL"]
        .replace(b"cp38-abi3-linux_aarch64", b"cp38-abi3-manylinux_2_28_x86_64")
        .replace(b"cp38-abi3-linux_x86_64", b"cp38-abi3-manylinux_2_28_x86_64"),
    }
    numbers = tuple(map(int, version.split(".")))
    module = f"__version__ = version = '{version}'\n__version_tuple__ = version_tuple = {numbers}\n"
    package = {**SOURCES, "demo/vendored.py": BUILT["demo/vendored.py"], "demo/_version.py": module.encode()}
    path = folder / f"demo-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    return make_wheel(path, package, info, dist_info=f"demo-{version}.dist-info")


def local_index(links: Path) -> PackageIndex:
    return PackageIndex(PipConfig(find_links=(str(links),), no_index=True))


def test_an_unvouched_file_that_is_not_what_it_says_is_refused(project: Project, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / "demo-1.1.0.tar.gz").write_bytes(sdist_bytes(tmp_path, "1.1.1"))
    with pytest.raises(IntegrityError, match=r"is version 1\.1\.1, not 1\.1\.0"):
        find_candidate(project.workspace, "demo", "1.1.0", index=local_index(links))
    (links / "demo-1.1.0.tar.gz").write_bytes(sdist_bytes(tmp_path, "1.1.0"))
    make_wheel_of(tmp_path, "1.2.0").rename(links / "demo-1.1.0-cp38-abi3-manylinux_2_28_x86_64.whl")
    with pytest.raises(IntegrityError, match=r"is not a sound wheel of 1\.1\.0"):
        find_candidate(project.workspace, "demo", "1.1.0", index=local_index(links))


def test_sources_that_disagree_are_named(project: Project, server: IndexServer, tmp_path: Path) -> None:
    offer(server, tmp_path, "1.1.0")
    with serve() as other:
        offer(other, tmp_path, "1.1.0")
        other.files["demo-1.1.0.tar.gz"] += b"\n"
        config = PipConfig(index_url=server.index, extra_index_urls=(other.index,), retries=0, timeout=5.0)
        with pytest.raises(IntegrityError, match=r"different files called demo-1\.1\.0\.tar\.gz") as caught:
            find_candidate(project.workspace, "demo", "1.1.0", index=PackageIndex(config, backoff=0))
        assert [line.split(":")[0] for line in caught.value.details] == ["http", "http"]


def test_a_file_that_changes_under_its_name_is_refused(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    offer(server, tmp_path, "1.1.0")
    find(project, server, "1.1.0")
    server.files["demo-1.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"] = b"other"
    with pytest.raises(IntegrityError, match="when it was first looked up"):
        find(project, server, "1.1.0")


def test_wheels_that_arrive_later_are_taken(project: Project, server: IndexServer, tmp_path: Path) -> None:
    server.files["demo-1.1.0.tar.gz"] = sdist_bytes(tmp_path, "1.1.0")
    assert not find(project, server, "1.1.0").complete
    offer(server, tmp_path, "1.1.0")
    assert find(project, server, "1.1.0").complete
    assert find(project, server, "1.1.0", offline=True).complete


# -- without network


def test_offline_uses_what_was_looked_up(project: Project, server: IndexServer, tmp_path: Path) -> None:
    offer(server, tmp_path, "1.1.0")
    online = find(project, server, "1.1.0")
    asked = len(server.requests)
    assert find(project, server, "1.1.0", offline=True) == online
    assert len(server.requests) == asked
    for wanted in ("latest", "1.2.0"):
        with pytest.raises(NetworkError, match="--offline forbids"):
            find(project, server, wanted, offline=True)


# -- archives and folders


def test_an_archive_that_the_index_has_too_can_be_pinned(
    project: Project, server: IndexServer, tmp_path: Path
) -> None:
    path = tmp_path / "my copy.tar.gz"
    path.write_bytes(offer(server, tmp_path, "1.1.0"))
    found = find(project, server, str(path))
    assert (found.release, found.source, found.complete) == ("1.1.0", "folder", True)
    assert found.base == find(project, server, "1.1.0").base
    assert found.pin == find(project, server, "1.1.0").pin


def test_an_archive_of_ones_own_can_be_tried(project: Project, server: IndexServer, tmp_path: Path) -> None:
    path = tmp_path / "demo-1.1.0.tar.gz"
    path.write_bytes(sdist_bytes(tmp_path, "1.1.0", {**FILES, "demo/more.py": "MORE = 1\n"}))
    offer(server, tmp_path, "1.1.0")
    found = find(project, server, str(path))
    assert len(found.lacks) == 2
    assert "is another file" in found.lacks[1]
    assert files_of(found)["demo/more.py"] == b"MORE = 1\n"
    server.files.clear()
    assert find(project, server, str(path), offline=True).base == found.base


def test_an_unpacked_archive_has_the_same_tree(project: Project, server: IndexServer, tmp_path: Path) -> None:
    data = offer(server, tmp_path, "1.1.0")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    folder = tmp_path / "unpacked" / "demo-1.1.0"
    (folder / "demo" / "__pycache__").mkdir()
    (folder / "demo" / "__pycache__" / "core.pyc").write_bytes(b"x")
    found = find(project, server, f"{folder}/")
    expected = find(project, server, "1.1.0")
    assert found.base.git.tree(found.base.commit) == expected.base.git.tree(expected.base.commit)
    assert found.lacks == ("its sources are a local folder, so that there are no files to pin",)
    assert found.base == find(project, server, str(folder)).base
    (folder / "demo" / "core.py").write_text("X = 1\n")
    (folder / "link").symlink_to("demo/core.py")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    changed = find(project, server, str(folder))
    assert changed.base.commit != found.base.commit
    listed = changed.base.git.run("ls-tree", "-r", changed.base.commit).text
    assert "120000" in listed
    assert "100755" in listed


def test_other_things_are_no_sources(project: Project, server: IndexServer, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="no PKG-INFO"):
        find(project, server, str(tmp_path / "folder"))
    (tmp_path / "other.tar.gz").write_bytes(b"not an archive")
    with pytest.raises(IntegrityError, match="not a readable source archive"):
        find(project, server, str(tmp_path / "other.tar.gz"))
    make_sdist(tmp_path / "else.tar.gz", {"PKG-INFO": "Name: other\nVersion: 1.0\n"})
    with pytest.raises(IntegrityError, match="is other, not demo"):
        find(project, server, str(tmp_path / "else.tar.gz"))


# -- the layout


def layout_notes(
    project: Project, server: IndexServer, folder: Path, files: Mapping[str, str]
) -> tuple[str, ...]:
    server.files["demo-1.1.0.tar.gz"] = sdist_bytes(folder, "1.1.0", files)
    return find(project, server, "1.1.0").notes


def test_a_layout_that_fits_is_not_mentioned(project: Project, server: IndexServer, tmp_path: Path) -> None:
    assert layout_notes(project, server, tmp_path, FILES) == ()


def test_native_files_that_moved_are_noticed(project: Project, server: IndexServer, tmp_path: Path) -> None:
    moved = {name: text for name, text in FILES.items() if not name.startswith("csrc/")}
    moved["native/kernel.cu"] = "// kernel\n"
    assert layout_notes(project, server, tmp_path, moved) == (
        "layout.native: there is no csrc/ any more; its successor may have to be listed",
        "layout.native: native holds compiled sources now, and is not listed",
    )


@pytest.mark.parametrize(
    "line",
    [
        'import runpy; runpy.run_path("tools/make.py")',
        'HERE / "tools" / "make.py"',
        'os.path.join(HERE, "tools", "make.py")',
        '(HERE / "tools").joinpath("make.py")',
    ],
)
def test_a_script_that_the_build_runs_is_noticed(
    project: Project, server: IndexServer, tmp_path: Path, line: str
) -> None:
    files = {**FILES, "setup.py": f"{FILES['setup.py']}\n{line}\n", "tools/make.py": "", "tools/idle.py": ""}
    assert layout_notes(project, server, tmp_path, files) == (
        "layout.native: setup.py uses tools/make.py, which is not listed",
    )


def test_other_signs_of_a_new_layout(project: Project, server: IndexServer, tmp_path: Path) -> None:
    files = {**FILES, "CMakeLists.txt": "", "demo2.egg-info/SOURCES.txt": "", "setup.py": "not python("}
    del files["demo/__init__.py"]
    assert layout_notes(project, server, tmp_path, files) == (
        "layout.package: there is no demo/__init__.py",
        "layout.generated: demo2.egg-info/SOURCES.txt was made when the sdist was packed, and is not listed",
        "layout.native: CMakeLists.txt steers the build, and is not listed",
    )


def test_nothing_of_the_project_changes(project: Project, server: IndexServer, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (project.root / "upstream").rglob("*") if path.is_file()}
    offer(server, tmp_path, "1.1.0")
    find(project, server, "1.1.0")
    assert before == {
        path: path.read_bytes() for path in (project.root / "upstream").rglob("*") if path.is_file()
    }
