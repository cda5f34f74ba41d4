"""Upstream's repository as a source: the same bases and patches, and who touched which lines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from indexserver import IndexServer, serve
from stackproject import CORE, FILES, Project
from upstreamrepo import Upstream, index_of, pin_git

from vllm_stack.applying import apply_stack
from vllm_stack.errors import IntegrityError, NetworkError, UsageError
from vllm_stack.export import export_commit
from vllm_stack.git import Git
from vllm_stack.gitsource import UpstreamRepository, compare_trees
from vllm_stack.releases import Candidate, find_candidate, history_to

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with serve() as running:
        running.style, running.sizes = "json", True
        yield running


@pytest.fixture
def upstream(tmp_path: Path, project: Project) -> Upstream:
    """The repository of the project's target, whose first release is the pinned one."""
    made = Upstream(tmp_path / "up stream")
    made.tag("1.0.0")
    pin_git(project, made.url)
    return made


def find(project: Project, server: IndexServer, wanted: str, **options: bool) -> Candidate:
    return find_candidate(project.workspace, "demo", wanted, source="git", index=index_of(server), **options)


def repository(project: Project, *, offline: bool = False) -> UpstreamRepository:
    return UpstreamRepository.of(project.workspace, project.stack.pin, offline=offline)


# -- bases


def test_a_tag_gives_the_blobs_of_the_sdist(
    project: Project, upstream: Upstream, server: IndexServer
) -> None:
    upstream.edit("demo/core.py", "return 2\n", "return 2  # two\n", "[Core] Two (#2)")
    commit = upstream.commit(
        "[CI] Workflow (#3)", {".github/ci.yml": "on: push\n", "demo/crlf.py": "A\r\nB\n"}
    )
    upstream.tag("1.1.0")
    server.files |= upstream.archives("1.1.0")
    found = find(project, server, "1.1.0")
    sdist = find_candidate(project.workspace, "demo", "1.1.0", source="sdist", index=index_of(server))
    assert (found.source, found.complete, found.pin) == ("git", True, sdist.pin)
    assert found.pin_text == sdist.pin_text
    assert commit.startswith(str(found.pin.commit))
    difference = compare_trees(found.base, sdist.base)
    assert (difference.differing, difference.only_git, difference.only_sdist) == ((), (".github/ci.yml",), ())
    assert found.notes == ("not in the sdist, so that no patch may touch it: .github/ci.yml",)


def test_the_base_of_a_tag_is_the_same_everywhere(
    project: Project, upstream: Upstream, server: IndexServer, tmp_path: Path
) -> None:
    first = find(project, server, "1.0.0").base
    second = Project(tmp_path / "another", project.capsys)
    pin_git(second, upstream.url)
    again = find_candidate(second.workspace, "demo", "1.0.0", source="git", index=index_of(server)).base
    assert again.commit == first.commit
    assert first.git.run("rev-list", "--parents", first.commit).lines == [first.commit]
    assert first.git.tree(first.commit) == project.base.git.tree(project.base.commit)
    # It stands by itself: nothing is missing that git would go and fetch.
    assert first.git.run("fsck", "--full", "--strict", "--no-dangling").returncode == 0


def test_patches_are_the_same_bytes_on_both_bases(
    stacked: Project, upstream: Upstream, server: IndexServer
) -> None:
    base = find(stacked, server, "1.0.0").base
    applied = apply_stack(base, stacked.stack)
    assert len(applied.patches) == 3
    exported = [export_commit(base.git, patch.commit or "") for patch in applied.patches]
    assert exported == [patch.data for patch in stacked.stack.patches]
    sdist = apply_stack(stacked.base, stacked.stack)
    assert base.git.tree(applied.head) == stacked.base.git.tree(sdist.head)


def test_generated_files_that_upstream_keeps_are_left_out(
    project: Project, upstream: Upstream, server: IndexServer
) -> None:
    upstream.commit("[Core] Keep it (#2)", {"PKG-INFO": "kept\n", "demo.egg-info/x": "kept\n"})
    upstream.git("tag", "--force", "v1.0.0")
    base = find(project, server, "1.0.0").base
    assert sorted(base.git.run("ls-tree", "-r", "--name-only", base.commit).lines) == sorted(FILES)


def test_an_sdist_of_other_sources_is_not_pinned(
    project: Project, upstream: Upstream, server: IndexServer
) -> None:
    upstream.edit("demo/core.py", "return 2\n", "return 3\n", "[Core] Three (#2)")
    upstream.tag("1.1.0")
    server.files |= upstream.archives("1.1.0")
    server.files["demo-1.1.0.tar.gz"] = upstream.sdist("1.1.0", {"demo/core.py": "X = 1\n", "new.py": ""})
    found = find(project, server, "1.1.0")
    assert found.lacks == ("files of the tag v1.1.0 are not those of the sdist: demo/core.py",)
    assert found.notes == ("layout.generated: not in the tag v1.1.0: new.py",)


def test_a_tag_that_was_moved_is_refused(project: Project, upstream: Upstream, server: IndexServer) -> None:
    upstream.edit("demo/core.py", "return 2\n", "return 3\n", "[Core] Three (#2)")
    upstream.tag("1.1.0")
    server.files |= upstream.archives("1.1.0")
    upstream.edit("demo/core.py", "return 4\n", "return 5\n", "[Core] Five (#3)")
    upstream.git("tag", "--force", "v1.1.0")
    with pytest.raises(IntegrityError, match=r"v1\.1\.0 of file://.* is commit .*, and must be"):
        find(project, server, "1.1.0")


# -- revisions


def test_any_revision_can_be_tried(project: Project, upstream: Upstream, server: IndexServer) -> None:
    upstream.edit("demo/core.py", "return 2\n", "return 3\n", "[Core] Three (#2)")
    commit = upstream.edit("demo/core.py", "return 4\n", "return 5\n", "[Core] Five (#3)")
    branch = upstream.git("rev-parse", "--abbrev-ref", "HEAD")
    upstream.git("branch", "releases/next")
    for revision in (commit, branch, "releases/next"):
        found = find(project, server, revision)
        assert (found.release, found.pin.commit) == ("1.0.1.dev2", commit)
        assert found.lacks
        assert found.pin_text.startswith("# Not a pin")
        history = history_to(project.workspace, project.stack.pin, found)
        assert history is not None
        assert [made.pull_request for made in history.touching("demo/core.py", range(1, 40))] == [2, 3]
    # A branch moves, and is looked up anew each time.
    later = upstream.edit("demo/core.py", "return 5\n", "return 6\n", "[Core] Six (#4)")
    assert find(project, server, branch).pin.commit == later
    auto = find_candidate(project.workspace, "demo", commit, index=index_of(server))
    assert auto.source == "git"


@pytest.mark.parametrize(
    "revision", ["nothing", "v9.9.9x", "--upload-pack=x", "a..b", "/etc/x.tar.gz", "f" * 40, "HEAD^"]
)
def test_revisions_that_do_not_exist(
    project: Project, upstream: Upstream, server: IndexServer, revision: str
) -> None:
    with pytest.raises((UsageError, NetworkError)):
        find(project, server, revision)


@pytest.mark.parametrize(
    "address", ["ext::sh -c 'touch /tmp/x'", "http://h/x.git", "git://h/x", "/srv/x.git", "host:x.git"]
)
def test_addresses_that_are_not_to_be_trusted(project: Project, server: IndexServer, address: str) -> None:
    pin_git(project, address)
    with pytest.raises(UsageError, match="git address"):
        find(project, server, "1.0.0")


def test_a_repository_that_cannot_be_reached(project: Project, server: IndexServer, tmp_path: Path) -> None:
    pin_git(project, (tmp_path / "nowhere").as_uri())
    with pytest.raises(NetworkError, match="cannot reach file://") as caught:
        find(project, server, "1.0.0")
    assert "--source sdist" in str(caught.value.hint)


def test_offline_uses_what_was_fetched(project: Project, upstream: Upstream, server: IndexServer) -> None:
    upstream.edit("demo/core.py", "return 2\n", "return 3\n", "[Core] Three (#2)")
    upstream.tag("1.1.0")
    server.files |= upstream.archives("1.1.0")
    with pytest.raises(NetworkError, match="--offline forbids"):
        find(project, server, "1.1.0", offline=True)
    online = find(project, server, "1.1.0")
    asked = history_to(project.workspace, project.stack.pin, online)
    assert asked is not None
    upstream.folder.rename(upstream.folder.with_name("gone"))
    found = find(project, server, "1.1.0", offline=True)
    assert found == online
    history = history_to(project.workspace, project.stack.pin, found, offline=True)
    assert history is not None
    # Contents come when they are asked for, and nothing can come any more.
    with pytest.raises(NetworkError, match="cannot read the history"):
        history.touching("demo/core.py", range(1, 9))


def test_what_a_killed_fetch_left_is_in_nobodys_way(project: Project, upstream: Upstream) -> None:
    source = repository(project)
    source.commit("v1.0.0")
    for name in ("packed-refs.lock", "config.lock", "refs/tags/v1.1.0.lock", "objects/pack/tmp_pack_x"):
        (source.folder / name).write_bytes(b"")
    commit = upstream.edit("demo/core.py", "return 2\n", "return 3\n", "[Core] Three (#2)")
    upstream.tag("1.1.0")
    assert source.commit("v1.1.0") == commit


def test_two_processes_may_fetch_at_once(project: Project, upstream: Upstream) -> None:
    commits = {}
    for number in range(6):
        commits[f"1.{number}.1"] = upstream.commit(f"[X] {number}", {"demo/other.py": f"VALUE = {number}\n"})
        upstream.tag(f"1.{number}.1")
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda version: repository(project).commit(f"v{version}"), commits)
        assert list(found) == list(commits.values())


# -- history


def ask(project: Project, upstream: Upstream, path: str, lines: range) -> list[int | None]:
    upstream.tag("1.1.0")
    source = repository(project)
    history = source.history(source.commit("v1.0.0"), source.commit("v1.1.0"))
    return [commit.pull_request for commit in history.touching(path, lines)]


def line_of(number: int) -> range:
    """Return the line that says what function ``number`` returns."""
    return range(4 * number + 2, 4 * number + 3)


def test_commits_that_touched_the_lines(project: Project, upstream: Upstream) -> None:
    upstream.edit("demo/core.py", "return 5\n", "return 50\n", "[Core] Fifty (#2)")
    upstream.edit("demo/core.py", "def function_0", "# A comment.\n\n\ndef function_0", "[Doc] Say it (#3)")
    upstream.edit("demo/core.py", "return 50\n", "return 500\n", "[Core] Five hundred (#4)")
    upstream.edit("demo/other.py", "1", "2", "[Other] Two (#5)")
    assert ask(project, upstream, "demo/core.py", line_of(5)) == [2, 4]
    assert ask_again(project, "demo/core.py", line_of(6)) == []
    assert ask_again(project, "demo/core.py", range(1, 2)) == [3]
    assert ask_again(project, "demo/core.py", range(1, 1)) == [3]
    assert ask_again(project, "demo/core.py", range(2, 48)) == [2, 4]
    assert ask_again(project, "demo/other.py", range(1, 2)) == [5]


def ask_again(project: Project, path: str, lines: range) -> list[int | None]:
    source = repository(project)
    history = source.history(source.commit("v1.0.0"), source.commit("v1.1.0"))
    return [commit.pull_request for commit in history.touching(path, lines)]


def test_a_server_that_sends_everything_will_do(project: Project, upstream: Upstream) -> None:
    upstream.git("config", "uploadpack.allowFilter", "false")
    upstream.edit("demo/core.py", "return 5\n", "return 50\n", "[Core] Fifty (#2)")
    assert ask(project, upstream, "demo/core.py", line_of(5)) == [2]
    upstream.folder.rename(upstream.folder.with_name("gone"))
    assert ask_again(project, "demo/core.py", line_of(5)) == [2]


def test_what_is_said_of_a_commit(project: Project, upstream: Upstream) -> None:
    ids = [
        upstream.edit("demo/other.py", "1", "2", "[Other] Revert (#7) of ü (#12)"),
        upstream.edit("demo/other.py", "2", "3", "No number"),
    ]
    upstream.tag("1.1.0")
    source = repository(project)
    history = source.history(source.commit("v1.0.0"), source.commit("v1.1.0"))
    first, second = history.touching("demo/other.py", range(1, 2))
    assert (first.id, first.subject, first.pull_request) == (ids[0], "[Other] Revert (#7) of ü (#12)", 12)
    assert (second.id, second.pull_request, second.date) == (ids[1], None, "2020-09-13")


def test_deleted_lines_are_found_by_their_place(project: Project, upstream: Upstream) -> None:
    upstream.edit("demo/core.py", "def function_5():\n    return 5\n\n\n", "", "[Core] No five (#2)")
    upstream.edit("demo/core.py", "return 9\n", "return 90\n", "[Core] Ninety (#3)")
    assert ask(project, upstream, "demo/core.py", line_of(5)) == [2]


def test_a_renamed_file_is_followed(project: Project, upstream: Upstream) -> None:
    upstream.edit("demo/core.py", "return 5\n", "return 50\n", "[Core] Fifty (#2)")
    upstream.git("mv", "demo/core.py", "demo/moved.py")
    upstream.commit("[Core] Move (#3)")
    upstream.edit("demo/moved.py", "return 6\n", "return 60\n", "[Core] Sixty (#4)")
    upstream.edit("demo/moved.py", "return 50\n", "return 500\n", "[Core] Five hundred (#5)")
    upstream.git("mv", "demo/moved.py", "demo/again.py")
    upstream.commit(
        "[Core] Move again (#6)",
        {"demo/again.py": (upstream.folder / "demo/again.py").read_text() + "# End\n"},
    )
    assert ask(project, upstream, "demo/core.py", line_of(5)) == [2, 3, 5, 6]


def test_a_deleted_file_ends_with_the_commit_that_did_it(project: Project, upstream: Upstream) -> None:
    upstream.edit("demo/core.py", "return 5\n", "return 50\n", "[Core] Fifty (#2)")
    upstream.commit("[Core] Delete (#3)", {"demo/core.py": None})
    upstream.edit("demo/other.py", "1", "2", "[Other] Two (#4)")
    assert ask(project, upstream, "demo/core.py", line_of(5)) == [2, 3]


def test_a_file_that_is_deleted_and_comes_back(project: Project, upstream: Upstream) -> None:
    upstream.commit("[Core] Delete (#2)", {"demo/core.py": None})
    upstream.commit("[Core] Bring back (#3)", {"demo/core.py": CORE.replace("return 5\n", "return 55\n")})
    assert ask(project, upstream, "demo/core.py", line_of(5)) == [3]


def test_a_file_that_never_was_there_has_no_history(project: Project, upstream: Upstream) -> None:
    upstream.edit("demo/other.py", "1", "2", "[Other] Two (#2)")
    assert ask(project, upstream, "demo/never.py", range(1, 3)) == []


def test_a_file_that_appeared_has_all_its_commits(project: Project, upstream: Upstream) -> None:
    upstream.commit("[New] Add (#2)", {"demo/new.py": "A = 1\n"})
    upstream.edit("demo/new.py", "1", "2", "[New] Change (#3)")
    assert ask(project, upstream, "demo/new.py", range(1, 1)) == [2, 3]


def test_releases_on_branches_of_their_own(project: Project, upstream: Upstream) -> None:
    """A release branch picks fixes that the trunk has under other ids; they are not between the releases."""
    trunk = upstream.git("rev-parse", "--abbrev-ref", "HEAD")
    fork = upstream.git("rev-parse", "HEAD")
    upstream.git("checkout", "--quiet", "-b", "releases/1.0")
    upstream.edit("demo/core.py", "return 3\n", "return 30\n", "[Fix] Thirty (#3)")
    upstream.git("tag", "--force", "v1.0.0")
    upstream.git("checkout", "--quiet", trunk)
    assert upstream.git("rev-parse", "HEAD") == fork
    upstream.edit("demo/core.py", "return 3\n", "return 30\n", "[Fix] Thirty, on the trunk (#3)")
    upstream.edit("demo/core.py", "return 30\n", "return 31\n", "[Core] Thirty-one (#4)")
    assert ask(project, upstream, "demo/core.py", line_of(3)) == [3, 4]


def test_contents_come_in_one_go_and_only_those_needed(project: Project, upstream: Upstream) -> None:
    for number in range(2, 8):
        upstream.edit("demo/core.py", f"return {number}\n", f"return {number}0\n", f"[Core] More (#{number})")
        upstream.edit("demo/other.py", "VALUE = ", "VALUE = 1", f"[Other] More (#{number}0)")
    assert ask(project, upstream, "demo/core.py", range(1, 49)) == [2, 3, 4, 5, 6, 7]
    clone = Git(repository(project).folder)
    # One pack for each tag, and one for all contents of the one file.
    assert len(list((repository(project).folder / "objects" / "pack").glob("*.pack"))) == 3
    objects = clone.run("rev-list", "--objects", "--all", "--missing=print").lines
    words = ("log", "--format=", "--raw", "--no-abbrev", "--no-renames", "v1.1.0", "--", "demo/other.py")
    others = {line.split()[3] for line in upstream.git(*words).splitlines()}
    assert len(others) == 7
    assert others <= {line[1:] for line in objects if line.startswith("?")}


def test_a_clone_with_a_hostile_configuration(project: Project, upstream: Upstream, tmp_path: Path) -> None:
    upstream.edit("demo/core.py", "return 5\n", "return 50\n", "[Core] Fifty (#2)")
    upstream.git("mv", "demo/core.py", "demo/moved.py")
    upstream.commit("[Core] Move (#3)")
    source = repository(project)
    source.commit("v1.0.0")
    with (source.folder / "config").open("a") as config:
        config.write(
            "[diff]\n\tnoprefix = true\n\trenames = false\n\texternal = /bin/false\n\talgorithm = patience\n"
            "[log]\n\tshowSignature = true\n\tdate = relative\n\tfollow = true\n\tdecorate = full\n"
            "[fetch]\n\tprune = true\n\tpruneTags = true\n\tfsckObjects = true\n[color]\n\tui = always\n"
            "[core]\n\thooksPath = /nonexistent\n\tquotePath = false\n[protocol]\n\tallow = never\n"
            "[format]\n\tpretty = oneline\n[uploadpack]\n\tpackObjectsHook = /bin/false\n"
        )
    assert ask(project, upstream, "demo/core.py", line_of(5)) == [2, 3]
