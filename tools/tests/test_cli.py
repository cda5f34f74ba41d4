"""What holds for every command: help, exit codes, JSON, releases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from vllm_stack.cli import COMMANDS, main
from vllm_stack.errors import EXIT_CODES
from vllm_stack.workspace import PROJECT_ROOT

if TYPE_CHECKING:
    from stackproject import Project


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main([*words, "--help"])
    return capsys.readouterr().out


def test_the_group_documents_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(capsys).split()).replace("work- in", "work-in")
    for name in COMMANDS:
        assert name in text
    for code, kind in EXIT_CODES.items():
        assert f"{code} {kind}" in text


def test_every_class_of_failure_has_its_own_code() -> None:
    kinds = ["usage", "network", "integrity", "conflict", "lint", "build", "verification", "work-in-progress"]
    assert [EXIT_CODES[code] for code in range(2, 10)] == kinds


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_json(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = help_of(capsys, name)
    assert "Example: tools/vllm-stack" in text
    assert "--json" in text
    assert "--target" in text or name == "verify"


def test_help_does_not_import_what_it_does_not_need() -> None:
    code = (
        "import sys; from vllm_stack.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('pydantic', 'requests', 'rich.console') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT / "tools", capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_json_goes_to_stdout_and_text_to_stderr(stacked: Project) -> None:
    stacked.capsys.readouterr()
    main(["status", "--root", str(stacked.root), "--cache-dir", str(stacked.root / "cache"), "--json", "-"])
    out, err = stacked.capsys.readouterr()
    document = json.loads(out)
    assert (document["schema"], document["command"], document["ok"]) == (1, "status", True)
    assert "demo 1.0.0" in err


def test_json_goes_into_a_pipe_and_leaves_it_there(stacked: Project) -> None:
    """Replacing it, as a file is replaced, would take `/dev/null` away from a machine whose root ran this."""
    pipe = stacked.root / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        main(
            [
                "status",
                "--root",
                str(stacked.root),
                "--cache-dir",
                str(stacked.root / "c"),
                "--json",
                str(pipe),
            ]
        )
        document = json.loads(os.read(reader, 1 << 16))
    finally:
        os.close(reader)
    assert document["command"] == "status"
    assert pipe.is_fifo()


def test_errors_are_in_the_json_too(project: Project) -> None:
    done = project.run("lint", "--target", "nothing")
    assert done.code == 2
    assert done.report == {
        "schema": 1,
        "command": "lint",
        "ok": False,
        "error": {
            "kind": "usage",
            "exit_code": 2,
            "message": "there is no target nothing",
            "hint": "targets: demo",
            "details": [],
        },
    }


def test_a_report_that_cannot_be_written(project: Project) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["status", "--root", str(project.root), "--json", str(project.root / "no" / "such" / "folder")])
    assert stop.value.code == 2
    assert "cannot write the report" in project.capsys.readouterr().err


@pytest.mark.parametrize("words", [["no-such-command"], ["lint", "--no-such-option"], ["status", "surplus"]])
def test_bad_arguments(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2


def test_a_release_gives_the_stack_its_number(stacked: Project) -> None:
    stack_id = stacked.stack.stack_id
    assert stacked.ok("status").report["targets"][0]["version"] == f"1.0.0+bw.0.s{stack_id[:8]}"
    report = stacked.ok("release", "--target", "demo").report
    assert (report["upstream"], report["number"], report["stack_id"]) == ("1.0.0", 1, stack_id)
    assert stacked.stack.stack_id == stack_id
    assert stacked.ok("status").report["targets"][0]["version"] == "1.0.0+bw.1"
    again = stacked.run("release", "--target", "demo")
    assert again.code == 2
    assert "released already, as 1.0.0+bw.1" in again.err
    assert stacked.series.read_text().startswith("# The order of the demo stack.\n")


def test_a_stack_with_lint_errors_is_not_released(stacked: Project) -> None:
    stacked.patch_file("0198-demo-topic-orphan.patch").write_bytes(b"")
    assert stacked.run("release", "--target", "demo").code == 6
    assert stacked.run("release").code == 2
