"""``test``: the patches' own tests, run in scratch trees; and which patch breaks one."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stackproject import Project, message
from wheelkit import BUILT, INFO, make_wheel

from vllm_stack.bisecting import first_bad
from vllm_stack.hashing import sha256_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = Path(__file__).parents[1]
FIRST, SECOND, THIRD = (
    "0100-demo-topic-return-a-hundred.patch",
    "0101-demo-topic-add-a-module.patch",
    "0200-second-return-nine-hundred.patch",
)
IMPORTS = "python -c 'import demo.core'"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files; nothing may be left in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def set_tests(project: Project, *commands: str) -> None:
    """Give the patches these test commands, in order."""
    left = list(commands)
    lines = [
        f"test = {json.dumps(left.pop(0))}" if line.startswith("test = ") and left else line
        for line in project.series.read_text().splitlines()
    ]
    project.series.write_text("\n".join(lines) + "\n")


def run_tests(project: Project, *words: str, native: str = "none") -> Any:
    return project.run("test", "--offline", "--python", sys.executable, "--native", native, *words)


def trials(done: Any) -> list[dict[str, Any]]:
    """Return the trials of the one target."""
    (target,) = done.report["targets"]
    found: list[dict[str, Any]] = target["trials"]
    return found


def bisection(done: Any) -> dict[str, Any]:
    """Return the one bisection."""
    (target,) = done.report["targets"]
    (found,) = target["bisections"]
    result: dict[str, Any] = found
    return result


def test_each_patch_is_tested_in_the_tree_after_it(stacked: Project) -> None:
    check = (
        "import demo.core as c, os; print([c.function_1(), os.path.exists('demo/new.py'), c.function_9()])"
    )
    set_tests(stacked, *[f'python -c "{check}"'] * 3)
    before = stacked.git("status", "--porcelain")
    done = run_tests(stacked)
    assert done.code == 0
    assert [trial["output"] for trial in trials(done)] == [
        "[100, False, 9]\n",
        "[100, True, 9]\n",
        "[100, True, 900]\n",
    ]
    assert [trial["outcome"] for trial in trials(done)] == ["passed"] * 3
    assert f"  passed {FIRST}, " in done.out
    assert stacked.git("status", "--porcelain") == before


def test_a_test_that_fails_ends_the_command_with_its_own_code(stacked: Project) -> None:
    set_tests(stacked, IMPORTS, "echo 'bad \033[31mnews'; exit 3", IMPORTS)
    done = run_tests(stacked)
    assert done.code == 10
    assert done.error["kind"] == "test"
    assert done.error["details"] == [f"{SECOND}: failed: echo 'bad \033[31mnews'; exit 3"]
    assert [trial["outcome"] for trial in trials(done)] == ["passed", "failed", "passed"]
    assert trials(done)[1]["status"] == 3
    assert "    | bad \\x1b[31mnews\n" in done.out


def test_what_a_test_that_passes_says_last_is_shown(stacked: Project) -> None:
    set_tests(stacked, "echo first; echo '1 skipped, 22 deselected'; echo", IMPORTS, "true")
    done = run_tests(stacked)
    assert done.code == 0
    assert [line for line in done.out.splitlines() if "|" in line] == ["    | 1 skipped, 22 deselected"]


def test_one_patch_by_its_number(stacked: Project) -> None:
    set_tests(stacked, "exit 1", IMPORTS, "exit 1")
    done = run_tests(stacked, "--patch", "0101")
    assert done.code == 0
    assert [trial["patch"] for trial in trials(done)] == [SECOND]


def test_each_tree_is_fresh_and_gone_afterwards(stacked: Project, temporary: Path) -> None:
    leave = "test ! -e junk && touch junk demo/junk $TMPDIR/junk && mkdir -m 0 shut && chmod a-w demo && pwd"
    set_tests(stacked, leave, leave, leave)
    done = run_tests(stacked)
    assert done.code == 0, done.out
    places = {trial["output"].strip() for trial in trials(done)}
    assert len(places) == 3
    assert all(place.startswith(str(temporary)) and not Path(place).exists() for place in places)


def test_the_environment_of_a_test(stacked: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_STACK_USER_PYTHONPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", "relative:/elsewhere")
    monkeypatch.setenv("OWN_VARIABLE", "kept")
    show = "import demo, os, sys; print(sys.executable, os.environ['PYTHONPATH'], os.environ['OWN_VARIABLE'])"
    set_tests(stacked, f'cd / && python -c "{show}; print(demo.__file__)"', f'python3 -c "{show}"')
    done = run_tests(stacked, "--patch", "0100", "--patch", "0101")
    assert done.code == 0, done.out
    program, path, variable, file = trials(done)[0]["output"].split()
    tree, *rest = path.split(":")
    assert (program, variable) == (sys.executable, "kept")
    assert rest == [str(Path("relative").absolute()), "/elsewhere"]
    assert file == f"{tree}/demo/__init__.py"
    assert trials(done)[1]["output"].startswith(f"{sys.executable} ")


def test_a_test_that_takes_too_long_is_ended_with_its_children(stacked: Project, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    set_tests(stacked, f"echo begun; (sleep 600 & echo $! > {note}; wait)")
    done = run_tests(stacked, "--patch", "0100", "--timeout", "1")
    assert done.code == 10
    (trial,) = trials(done)
    assert (trial["outcome"], trial["status"], trial["output"]) == ("timed-out", None, "begun\n")
    assert trial["seconds"] < 30
    assert not is_running(int(note.read_text()))


def test_what_a_test_leaves_running_is_ended(stacked: Project, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    set_tests(stacked, f"sleep 600 >/dev/null 2>&1 & echo $! > {note}")
    assert run_tests(stacked, "--patch", "0100").code == 0
    assert not is_running(int(note.read_text()))


def is_running(pid: int) -> bool:
    """Say whether a process is there and no zombie that nobody reaps."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


def start(project: Project, *words: str, stderr: Any = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start the command line as a process of its own."""
    common = ["--root", str(project.root), "--cache-dir", str(project.root / "cache"), "--offline"]
    command = [sys.executable, "-m", "vllm_stack", "test", "--python", sys.executable, "--native", "none"]
    return subprocess.Popen(
        [*command, *words, *common],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def wait_for(path: Path) -> str:
    """Return the text of a file once it has any."""
    for _ in range(600):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{path} never came")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let what is started here be interrupted: a shell has what it runs in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_nothing_behind(
    stacked: Project, tmp_path: Path, number: int, code: int
) -> None:
    note = tmp_path / "pid"
    set_tests(stacked, f"(trap '' TERM INT; sleep 600 & echo $! > {note}; wait)")
    process = start(stacked, "--patch", "0100")
    child = int(wait_for(note))
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not is_running(child)


def test_a_terminal_sees_the_output_while_it_comes(stacked: Project, tmp_path: Path) -> None:
    go = tmp_path / "go"
    set_tests(stacked, f"echo first; while ! test -e {go}; do sleep 0.1; done; echo second; exit 1")
    ours, theirs = pty.openpty()
    process = start(stacked, "--patch", "0100", stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"first" not in seen.replace(b"echo first", b""):
        seen += os.read(ours, 1024)
    assert b"second" not in seen.replace(b"echo second", b"")
    go.touch()
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 10
    # It was seen already; the report does not repeat it.
    assert b"    | first" not in out


def test_endless_output_keeps_its_end(stacked: Project) -> None:
    set_tests(stacked, "python -c \"print('x' * 3_000_000, 'the end')\"; exit 1")
    (trial,) = trials(run_tests(stacked, "--patch", "0100"))
    assert trial["output"].endswith("x the end\n")
    assert len(trial["output"]) == 1 << 20
    assert trial["bytes_left_out"] == 3_000_000 + len(" the end\n") - (1 << 20)


def test_the_official_wheels_own_files_are_there(stacked: Project, capsys: Any) -> None:
    pin = stacked.workspace.pin_file("demo")
    package = {"demo/__init__.py": b"OFFICIAL = 1\n", **BUILT}
    wheel = make_wheel(stacked.root / "demo-1.0.0-cp38-abi3-manylinux_2_28_x86_64.whl", package, INFO)
    data = wheel.read_bytes()
    text = (
        pin.read_text().replace("0" * 64, sha256_bytes(data)).replace("size = 1\n", f"size = {len(data)}\n")
    )
    pin.write_text(text)
    cached = stacked.workspace.downloads / sha256_bytes(data) / wheel.name
    cached.parent.mkdir(parents=True)
    shutil.move(wheel, cached)
    show = "import demo.vendored, importlib.metadata as m, os; print(m.version('demo'), os.listdir('demo'))"
    set_tests(
        stacked, f"python -c \"{show}; assert not hasattr(demo, 'OFFICIAL')\"", "test ! -w demo/_C.abi3.so"
    )
    done = run_tests(stacked, "--patch", "0100", native="auto")
    assert done.code == 0, done.out
    output = trials(done)[0]["output"]
    assert output.startswith("1.0.0 ")
    assert "_C.abi3.so" in output
    assert "new.py" not in output
    # The second time they come from where they were unpacked.
    cached.unlink()
    assert run_tests(stacked, "--patch", "0100", native="wheel").code == 0
    (folder,) = (stacked.workspace.cache / "official").iterdir()
    assert (folder / "demo/_C.abi3.so").read_bytes() == BUILT["demo/_C.abi3.so"]
    assert not (folder / "demo/__init__.py").exists()


def test_without_the_wheel_nothing_runs(stacked: Project) -> None:
    set_tests(stacked, "touch /nonexistent/must-not-run")
    done = run_tests(stacked, native="wheel")
    assert done.code == 3
    assert not (stacked.workspace.cache / "official").exists() or not any(
        (stacked.workspace.cache / "official").iterdir()
    )


@pytest.mark.parametrize("python", ["/nonexistent/python", "no-such-program-anywhere"])
def test_a_python_that_is_not_there(stacked: Project, python: str) -> None:
    done = stacked.run("test", "--offline", "--python", python)
    assert done.code == 2


# -- bisection


@pytest.fixture
def later(project: Project) -> Project:
    """A stack of five; the fourth breaks the test that the first brings."""
    project.ok("apply")
    project.write("tests/check.py", "import demo.core as c\nassert c.function_3() == 3\n")
    project.commit(message("[Core] Bring a test"))
    for number in (1, 2, 3, 4):
        project.edit("demo/core.py", f"return {number}\n", f"return {number}00\n")
        project.commit(message(f"[Core] Multiply {number}"))
    project.ok("refresh")
    set_tests(project, "python tests/check.py", *[IMPORTS] * 4)
    return project


def test_the_later_patch_that_breaks_a_test_is_named(later: Project) -> None:
    assert run_tests(later, "--patch", "0100").code == 0
    done = run_tests(later, "--patch", "0100", "--bisect")
    assert done.code == 10
    found = bisection(done)
    assert (found["verdict"], found["before"]) == ("broken-by", False)
    assert found["culprits"] == ["0103-demo-topic-multiply-3.patch"]
    assert found["untestable"] == []
    assert "is broken by a later patch: 0103-demo-topic-multiply-3.patch\n" in done.out
    assert done.error["details"] == [
        "the test of 0100-demo-topic-bring-a-test.patch is broken by a later patch: "
        "0103-demo-topic-multiply-3.patch"
    ]


def test_all_tests_pass_at_the_end(later: Project) -> None:
    set_tests(later, IMPORTS)
    done = run_tests(later, "--bisect")
    assert done.code == 0
    (target,) = done.report["targets"]
    assert [item["verdict"] for item in target["bisections"]] == ["passes"] * 5


def test_trees_without_the_test_are_passed_over(project: Project) -> None:
    project.ok("apply")
    check = "import demo.core as c\nassert c.function_3() == 3\n"
    project.write("tests/check.py", check)
    project.commit(message("[Core] Bring a test"))
    (project.checkout / "tests/check.py").unlink()
    project.edit("demo/core.py", "return 3\n", "return 300\n")
    project.commit(message("[Core] Take it away"))
    project.write("tests/check.py", check)
    project.commit(message("[Core] Bring it back"))
    project.ok("refresh")
    set_tests(project, "python tests/check.py", IMPORTS, IMPORTS)
    found = bisection(run_tests(project, "--patch", "0100", "--bisect"))
    assert found["untestable"] == ["0101-demo-topic-take-it-away.patch"]
    assert found["culprits"] == [
        "0101-demo-topic-take-it-away.patch",
        "0102-demo-topic-bring-it-back.patch",
    ]


def test_the_earlier_patch_that_breaks_the_last_test_is_named(project: Project) -> None:
    project.ok("apply")
    for number in (1, 2, 3, 4):
        project.edit("demo/core.py", f"return {number}\n", f"return {number}00\n")
        project.commit(message(f"[Core] Multiply {number}"))
    project.write("tests/check.py", "import demo.core as c\nassert c.function_2() == 2\n")
    project.commit(message("[Core] Bring a test"))
    project.ok("refresh")
    set_tests(project, *[IMPORTS] * 4, "python tests/check.py")
    done = run_tests(project, "--patch", "0104", "--bisect")
    found = bisection(done)
    assert done.code == 10
    assert (found["verdict"], found["before"]) == ("broken-by", True)
    assert found["culprits"] == ["0101-demo-topic-multiply-2.patch"]
    assert "is broken by an earlier patch: 0101-demo-topic-multiply-2.patch\n" in done.out


def test_a_patch_that_fails_alone_breaks_its_own_test(stacked: Project) -> None:
    set_tests(stacked, "exit 1", IMPORTS, "exit 1")
    (target,) = run_tests(stacked, "--bisect").report["targets"]
    assert [item["verdict"] for item in target["bisections"]] == ["fails-alone", "passes", "fails-alone"]


def test_a_patch_that_needs_the_others_stays_undecided(project: Project) -> None:
    project.ok("apply")
    for number in range(3):
        project.write("demo/chain.py", "".join(f"step_{n} = {n}\n" for n in range(number + 1)))
        project.commit(message(f"[Core] Step {number}"))
    project.ok("refresh")
    set_tests(project, IMPORTS, IMPORTS, "exit 1")
    found = bisection(run_tests(project, "--patch", "0102", "--bisect"))
    assert found["verdict"] == "undecided"
    assert len(found["untestable"]) == 2


@given(data=st.data())
def test_bisection_narrows_down_as_far_as_can_be_told(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 30))
    first = data.draw(st.integers(1, count - 1))
    hidden = data.draw(st.sets(st.integers(1, count - 1))) - {count - 1}
    asked: list[int] = []

    def judge(state: int) -> bool | None:
        asked.append(state)
        return None if state in hidden else state < first

    good, bad = first_bad(count, judge)
    assert good < first <= bad
    assert good not in hidden
    assert set(range(good + 1, bad)) <= hidden
    assert len(asked) == len(set(asked))
    if not hidden:
        assert len(asked) <= count.bit_length()
