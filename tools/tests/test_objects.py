"""The reader of objects and the kept index: right answers for odd names and sizes, and always an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stackproject import GIT_CONFIGURATION
from tworeleases import commit_files

from vllm_stack.base import init_repository
from vllm_stack.git import Git
from vllm_stack.objects import ObjectError, ObjectReader, Objects
from vllm_stack.scratchindex import scratch_index

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = Path(__file__).parents[1]
NOWHERE = "0123456789012345678901234567890123456789"
#: Seconds in which a process ends that has nothing left to do.
PATIENCE = 20.0

FILES: dict[str, str | bytes] = {
    "top.py": "top\n",
    "empty": b"",
    "a folder/with spaces.py": "spaces\n",
    "a folder/deep/er/x": b"no line feed",
    "ünïcode/ß.py": "unicode\n",
    "minus-.py": "sorted before the folder minus\n",
    "minus/a": "in minus\n",
    "HEAD": "a file that is called like a revision\n",
    "big": bytes(range(256)) * 40_000,
}


@pytest.fixture
def git(tmp_path: Path) -> Git:
    return init_repository(tmp_path / "repo.git", bare=True)


@pytest.fixture
def commit(git: Git) -> str:
    return commit_files(git, FILES, "Files")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield the readers that are started, in order."""
    started: list[subprocess.Popen[bytes]] = []
    start = Git._start_reading

    def remembered(git: Git) -> subprocess.Popen[bytes]:
        started.append(start(git))
        return started[-1]

    monkeypatch.setattr(Git, "_start_reading", remembered)
    yield started
    assert all(process.returncode is not None for process in started), "a process was left behind"


def raw_tree(git: Git, *entries: tuple[bytes, bytes, str]) -> str:
    """Make a tree of entries (mode, name, id), in the order of git."""
    data = b"".join(mode + b" " + name + b"\0" + bytes.fromhex(blob) for mode, name, blob in entries)
    return git.run("hash-object", "-t", "tree", "-w", "--stdin", stdin=data).text


def alive(pid: int) -> bool:
    """Say whether a process runs (one that only waits to be collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- what is read


def test_every_file_is_read_as_it_is(git: Git, commit: str) -> None:
    with git.opened() as opened:
        assert {path: opened.blob(commit, path) for path in FILES} == {
            path: data if isinstance(data, bytes) else data.encode() for path, data in FILES.items()
        }
    assert git.blobs(commit, list(FILES))["big"] == FILES["big"]


def test_what_git_says_of_a_tree_is_what_is_read_of_it(git: Git, commit: str) -> None:
    listed = git.run("ls-tree", "-r", "-t", "-z", "--full-tree", commit).fields
    with git.opened() as opened:
        for head, _, path in (line.partition("\t") for line in listed):
            mode, kind, identity = head.split()
            entry = opened.entry(commit, path)
            assert entry is not None
            assert (entry.mode, entry.kind, entry.id) == (mode, kind, identity), path
        assert opened.tree(commit) == git.run("rev-parse", f"{commit}^{{tree}}").text
        assert opened.tree(opened.tree(commit)) == opened.tree(commit)


@pytest.mark.parametrize(
    "path", ["", "nothing", "top.py/x", "a folder/none", "a folder/", "/top.py", "a folder//x"]
)
def test_a_path_that_is_not_there_is_none(git: Git, commit: str, path: str) -> None:
    assert git.entry(commit, path) is None
    with pytest.raises(ObjectError, match="there is nothing"):
        git.blob(commit, path)


def test_a_folder_is_no_file(git: Git, commit: str) -> None:
    with pytest.raises(ObjectError, match="there is a tree"):
        git.blob(commit, "a folder")


def test_names_that_no_line_can_hold(git: Git) -> None:
    """A line feed, a tab, bytes that are not UTF-8, and what git's own syntax takes for something else."""
    blobs = {
        name: git.run("hash-object", "-w", "--stdin", stdin=name).text
        for name in sorted((b"line\nfeed", b"tab\there", b"\xff\xfe", b":(glob)**", b"x^{tree}", b'"quoted"'))
    }
    tree = raw_tree(git, *((b"100644", name, blob) for name, blob in blobs.items()))
    with git.opened() as opened:
        for name in blobs:
            assert opened.blob(tree, os.fsdecode(name)) == name


def test_links_and_submodules_have_their_kinds(git: Git) -> None:
    blob = git.run("hash-object", "-w", "--stdin", stdin=b"target").text
    tree = raw_tree(
        git, (b"120000", b"link", blob), (b"160000", b"module", NOWHERE), (b"100755", b"program", blob)
    )
    found = [git.entry(tree, path) for path in ("link", "module", "program")]
    assert [(entry.mode, entry.kind) for entry in found if entry] == [
        ("120000", "blob"),
        ("160000", "commit"),
        ("100755", "blob"),
    ]
    with pytest.raises(ObjectError, match="there is a commit"):
        git.blob(tree, "module")


def test_parents_are_those_of_commits(git: Git, commit: str) -> None:
    second = commit_files(git, {"x": "parent 0\n"}, f"Second\n\nparent {NOWHERE}\n", commit)
    with git.reading() as objects:
        assert objects.parents(commit) == ()
        assert objects.parents(second) == (commit,)
        assert objects.parents(git.tree(second)) is None
        assert objects.parents(NOWHERE) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (NOWHERE, "is not there"),
        ("no such name", "is not there"),
        ("two\nlines", "holds a line feed"),
        ("HEAD:", "is not there"),
    ],
)
def test_what_is_not_there_is_an_error_and_the_next_answer_is_right(
    git: Git, commit: str, name: str, said: str, processes: list[subprocess.Popen[bytes]]
) -> None:
    with git.opened() as opened:
        with pytest.raises(ObjectError, match=said):
            opened.data(name)
        assert opened.blob(commit, "top.py") == b"top\n"
    assert len(processes) == 1


def test_an_object_of_another_kind_is_an_error(git: Git, commit: str) -> None:
    blob = git.entry(commit, "top.py")
    assert blob is not None
    with git.reading() as objects:
        with pytest.raises(ObjectError, match="is a commit, and must be a blob"):
            objects.blob(commit)
        with pytest.raises(ObjectError, match="must be a tree"):
            objects.tree(blob.id)


def test_objects_that_are_made_meanwhile_are_found(git: Git, commit: str) -> None:
    with git.opened() as opened:
        assert opened.blob(commit, "top.py") == b"top\n"
        new = commit_files(git, {"top.py": "new\n"}, "New")
        git.run("repack", "-a", "-d", "-q")
        assert opened.blob(new, "top.py") == b"new\n"
        git.run("update-ref", "refs/heads/main", commit)
        first = opened.tree("main")
        git.run("update-ref", "refs/heads/main", new)
        assert (first, opened.tree("main")) == (git.tree(commit), git.tree(new)), "a name that moves was kept"


def test_a_repository_s_own_settings_change_nothing(git: Git, commit: str) -> None:
    assert git.git_dir is not None
    (git.git_dir / "info" / "attributes").write_text("* text eol=crlf ident filter=broken\n")
    for key, value in (
        ("core.autocrlf", "true"),
        ("filter.broken.smudge", "false"),
        ("filter.broken.required", "true"),
        ("core.pager", "false"),
        ("core.useReplaceRefs", "true"),
    ):
        git.run("config", key, value)
    other = git.run("hash-object", "-w", "--no-filters", "--stdin", stdin=b"another\n").text
    entry = git.entry(commit, "top.py")
    assert entry is not None
    git.run("update-ref", f"refs/replace/{entry.id}", other)
    assert git.blob(commit, "top.py") == b"top\n"


def test_the_tests_run_under_the_configuration_that_they_were_told() -> None:
    text = (Path.home() / ".gitconfig").read_text()
    assert bool(text) == (GIT_CONFIGURATION == "hostile")


# -- the process


def test_one_process_answers_all_while_it_is_opened(
    git: Git, commit: str, processes: list[subprocess.Popen[bytes]]
) -> None:
    with git.opened() as opened, opened.opened() as again:
        for path in FILES:
            assert again.blob(commit, path) == opened.blob(commit, path)
        assert len(processes) == 1
        assert processes[0].poll() is None
    assert processes[0].returncode is not None
    with pytest.raises(ValueError, match="after the repository was closed"):
        again.blob(commit, "top.py")


def test_nothing_is_started_before_something_is_asked(
    git: Git, processes: list[subprocess.Popen[bytes]]
) -> None:
    with git.opened():
        pass
    assert not processes


# Not SIGINT: a shell lets what it starts in the background ignore it.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_an_error_and_the_next_question_starts_another(
    git: Git, commit: str, processes: list[subprocess.Popen[bytes]], number: int
) -> None:
    with git.opened() as opened:
        assert opened.blob(commit, "top.py") == b"top\n"
        processes[0].send_signal(number)
        processes[0].wait(PATIENCE)
        with pytest.raises(ObjectError, match=rf"git ended \(status -{int(number)}\) before it gave"):
            opened.blob(commit, "empty")
        assert opened.blob(commit, "empty") == b""
    assert len(processes) == 2


@pytest.mark.parametrize(
    "answer",
    ["", "0123 blob 5", "0123 blob 5\\n123", "0123 blob 5\\n12345"],
    ids=["nothing", "half a header", "half of the bytes", "all but the line feed"],
)
def test_an_answer_that_breaks_off_is_an_error(answer: str) -> None:
    command = ["/bin/sh", "-c", f"read name; printf '{answer}'"]
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    reader = ObjectReader(start)
    with pytest.raises(ObjectError, match=r"git ended \(status 0\) before it gave"):
        reader.read(NOWHERE)
    assert started[0].returncode is not None
    reader.close()


def test_an_interrupted_answer_is_not_taken_for_the_next_one(
    git: Git, commit: str, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with git.opened() as opened:
        assert opened.blob(commit, "top.py") == b"top\n"
        stdout = processes[0].stdout

        class Interrupted:
            def readline(self) -> bytes:
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> object:
                return getattr(stdout, name)

        monkeypatch.setattr(processes[0], "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            opened.blob(commit, "big")
        assert opened.blob(commit, "empty") == b""
    assert stdout is not None
    assert stdout.closed


def test_a_stuck_process_does_not_keep_from_closing() -> None:
    started = []

    def start() -> subprocess.Popen[bytes]:
        # It neither reads to the end nor ends by itself, and has answered once.
        command = [
            "/bin/sh",
            "-c",
            "read name; echo $name missing; trap '' TERM INT; while :; do sleep 60; done",
        ]
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        )
        return started[-1]

    objects = Objects(ObjectReader(start))
    try:
        with pytest.raises(ObjectError, match="is not there"):
            objects.blob(NOWHERE)
        before = time.monotonic()
        objects.close()
        assert started[0].returncode == -signal.SIGKILL
        assert time.monotonic() - before < PATIENCE
    finally:
        with suppress(ProcessLookupError):  # the shell may have been killed before it slept
            os.killpg(started[0].pid, signal.SIGKILL)


def test_an_exception_closes_it(git: Git, commit: str, processes: list[subprocess.Popen[bytes]]) -> None:
    def fail() -> None:
        with git.opened() as opened:
            opened.blob(commit, "top.py")
            with scratch_index(opened, commit) as index:
                folders.append(Path(index._folder.name))
                raise RuntimeError("in the middle")

    folders: list[Path] = []
    with pytest.raises(RuntimeError):
        fail()
    assert len(processes) == 1
    assert not folders[0].exists()


def test_the_process_ends_with_one_that_is_killed(git: Git, commit: str) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(TOOLS)!r})
from pathlib import Path
from vllm_stack.git import Git
start = Git._start_reading
def told(git):
    process = start(git)
    print(process.pid, flush=True)
    return process
Git._start_reading = told
with Git(Path({str(git.git_dir)!r})).opened() as opened:
    opened.blob({commit!r}, "big")
    print("read", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reader = int(process.stdout.readline())
        assert process.stdout.readline() == b"read\n"
        assert alive(reader)
        process.kill()
    end = time.monotonic() + PATIENCE
    while alive(reader) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(reader)


# -- differences of trees, and the kept index


CHANGES: list[dict[str, str | bytes | None]] = [
    {"top.py": "changed\n"},
    {"top.py": None, "a folder/deep/er/x": None},
    {"minus/b": "new\n", "minus-.py": None},
    {"empty": None, "empty/now a folder": "x\n"},
    {"minus/a": None, "minus": "now a file\n"},
    {
        "a folder/with spaces.py": None,
        "a folder/with spaces.py/deep/x": "x\n",
        "a folder/deep": "y\n",
        "a folder/deep/er/x": None,
    },
    {path: None for path in FILES if path != "top.py"},
    {f"many/{number}": f"{number}\n" for number in range(300)},
]


def changed(change: dict[str, str | bytes | None]) -> dict[str, str | bytes]:
    files = {**FILES, **change}
    return {path: data for path, data in files.items() if data is not None}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_what_differs_is_what_git_says(git: Git, commit: str, change: dict[str, str | bytes | None]) -> None:
    other = commit_files(git, changed(change), "Other")
    for old, new in ((commit, other), (other, commit), (commit, commit)):
        fields = git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", old, new).fields
        listed = {
            path: None if meta.split()[1] == "000000" else (meta.split()[1], meta.split()[3])
            for meta, path in zip(fields[::2], fields[1::2], strict=True)
        }
        with git.reading() as objects:
            found = {path: entry and (entry.mode, entry.id) for path, entry in objects.changes(old, new)}
        assert found == listed


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_the_kept_index_holds_what_it_should(
    git: Git, commit: str, change: dict[str, str | bytes | None]
) -> None:
    other = commit_files(git, changed(change), "Other")
    with git.opened() as opened:
        for wanted in (commit, other, git.tree(commit), other, commit):
            with scratch_index(opened, wanted) as index:
                assert index.write() == git.tree(wanted)


def test_work_in_the_kept_index_does_not_show_the_next_time(git: Git, commit: str) -> None:
    with git.opened() as opened:
        for _ in range(2):
            with scratch_index(opened, commit) as index:
                index.put({"top.py": None, "empty": None})
                assert opened.entry(index.write(), "top.py") is None
            with scratch_index(opened, commit) as index:
                index.put({"top.py": None})  # and not written
            with scratch_index(opened, commit) as index:
                assert index.apply(b"no diff\n").returncode
                assert index.write() == git.tree(commit)


def test_an_index_within_another_is_another(git: Git, commit: str) -> None:
    other = commit_files(git, {"x": "x\n"}, "Other")
    with git.opened() as opened, scratch_index(opened, commit) as outer:
        with scratch_index(opened, other) as inner:
            assert inner.write() == git.tree(other)
        assert outer.write() == git.tree(commit)
