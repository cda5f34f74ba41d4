"""Every rule of lint, provoked on a real stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from stackproject import message

if TYPE_CHECKING:
    from stackproject import Project

FIRST = "0100-demo-topic-return-a-hundred.patch"
SECOND = "0101-demo-topic-add-a-module.patch"


def codes(project: Project, patch: str | None = FIRST) -> list[str]:
    """Return the codes of the errors about one patch (None: about the series)."""
    done = project.run("lint")
    findings = [found for found in done.report["targets"][0]["findings"] if found["level"] == "error"]
    assert done.code == (6 if findings else 0)
    return [found["code"] for found in findings if found["patch"] == patch]


def change(project: Project, old: bytes, new: bytes, name: str = FIRST) -> None:
    """Edit a patch file, which only a test may do."""
    file = project.patch_file(name)
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


def test_a_refreshed_stack_is_clean_and_its_paths_are_classified(stacked: Project) -> None:
    report = stacked.ok("lint").report["targets"][0]
    assert report["findings"] == []
    assert [(path["path"], path["kind"]) for path in report["paths"]] == [
        ("demo/core.py", "package"),
        ("demo/new.py", "package"),
        ("tests/test_core.py", "outside"),
        ("demo/core.py", "package"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"Upstream-Status: Pending\n", b"", ["trailer-missing"]),
        (b"Drop-When: ", b"Dropped-When: ", ["trailer-missing", "trailer-unknown"]),
        (b"Upstream-Status: Pending", b"Upstream-Status: Maybe", ["upstream-status"]),
        (b"Upstream-Status: Pending", b"Upstream-Status: Submitted", ["upstream-status"]),
        (b"Upstream-Status: Pending", b"Upstream-Status: Submitted https://example.invalid/1", []),
        (b"Upstream-Status: Pending", b"Upstream-Status: Backport https://example.invalid/1", []),
        (b"Upstream-Status: Pending", b"Upstream-Status: Inappropriate needs hardware", []),
        (b"Upstream-Status: Pending", b"Upstream-Status: Inappropriate", ["upstream-status"]),
        (b"Topic: demo-topic\n", b"Topic: demo-topic\nTopic: demo-topic\n", ["trailer-twice"]),
        (b"Topic: demo-topic", b"Topic: second", ["topic"]),
        (b"Signed-off-by: Contributor", b"Signed-off-by: Somebody", ["sign-off"]),
        (b"Subject: [Core] ", b"Subject: ", ["subject"]),
        (b"It is needed.\n\n", b"", ["reason"]),
        (b"It is needed.", b"Topic selection needs it.", []),
        (b"Topic: demo-topic\n", b"Topic: demo-topic\nreviewed-by: x\n", ["trailer-line"]),
        (b"Topic: demo-topic\n", b"Topic: demo-topic\nFixes #12\n", ["trailer-line"]),
        (b"upstream does the same", b"upstream does\nthe same", ["trailer-line"]),
        (b"upstream does the same", b"upstream does\n the same", []),
        (b"Subject: [Core] Return", b"Subject: =?foo?q?x?= Return", ["subject"]),
        (b"demo/core.py", b"demo/../core.py", ["path"]),
        (b" b/demo/core.py\nindex", b" b/demo/moved.py\nindex", ["rename"]),
        (b"From 0000", b"From 1000", ["from-line"]),
        (b"+    return 100\n", b"+    return 100 \n", ["trailing-whitespace"]),
        (b"+    return 100\n", b"+    return 100\t\n", ["trailing-whitespace"]),
        (b"+    return 100\n", b"+    return 100\r\n", ["crlf"]),
        (b"\n", b"\r\n", ["crlf"] * 5),
        (b"diff --git a/demo/core.py b/demo/core.py", b"diff --git demo/core.py demo/core.py", ["prefix"]),
        (b"--- a/demo/core.py", b"--- demo/core.py", ["prefix"]),
        (b"+++ b/demo/core.py", b"+++ demo/core.py", ["prefix"]),
    ],
)
def test_rules_of_one_patch(stacked: Project, old: bytes, new: bytes, expected: list[str]) -> None:
    change(stacked, old, new)
    assert codes(stacked) == expected


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"@@ -3,7 +3,8 @@", "demo/core.py: hunk 1: header says -7 +8 lines, it has -7 +7"),
        (b"@@ -3,8 +3,7 @@", "demo/core.py: hunk 1: header says -8 +7 lines, it has -7 +7"),
        (b"@@ -3,6 +3,6 @@", "demo/core.py: hunk 1: 1 lines more than its header says"),
        (b"@@ -3 +3 @@", "demo/core.py: hunk 1: 7 lines more than its header says"),
        (b"@@ 3,7 @@", "demo/core.py: hunk 1: not a hunk header"),
    ],
)
def test_wrong_hunk_counts_name_file_and_hunk(stacked: Project, header: bytes, said: str) -> None:
    change(stacked, b"@@ -3,7 +3,7 @@", header)
    done = stacked.run("lint")
    assert done.code == 6
    assert said in done.out
    assert stacked.run("apply").error["details"][0] == f"{FIRST}: malformed"


def test_the_second_hunk_is_named(stacked: Project) -> None:
    stacked.edit("demo/core.py", "return 0\n", "return 10\n")
    stacked.edit("demo/core.py", "return 7\n", "return 70\n")
    stacked.commit(message("[Core] Two hunks"))
    stacked.ok("refresh")
    change(stacked, b"@@ -27,7 +27,7 @@", b"@@ -27,7 +27,9 @@", "0102-demo-topic-two-hunks.patch")
    assert "demo/core.py: hunk 2: header says -7 +9 lines, it has -7 +7" in stacked.run("lint").out


def test_a_patch_without_a_diff(stacked: Project) -> None:
    file = stacked.patch_file(FIRST)
    file.write_bytes(file.read_bytes().partition(b"diff --git")[0])
    assert codes(stacked) == ["no-diff"]


def test_an_orphan_is_found(stacked: Project) -> None:
    stacked.patch_file("0199-demo-topic-forgotten.patch").write_bytes(b"")
    assert codes(stacked, None) == ["orphan"]


def test_a_missing_file_is_named(stacked: Project) -> None:
    stacked.patch_file(SECOND).unlink()
    done = stacked.run("lint")
    assert done.code == 2
    assert SECOND in done.error["message"]


def test_a_copy_is_found(stacked: Project) -> None:
    stacked.patch_file(SECOND).write_bytes(stacked.patch_file(FIRST).read_bytes())
    assert codes(stacked, None) == ["duplicate-subject", "duplicate-content"]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("0100-demo-topic-other.patch", ["duplicate-number"]),
        ("0200-demo-topic-other.patch", ["duplicate-number", "number"]),
        ("0101-second-other.patch", ["name"]),
        ("other.patch", ["name"]),
        ("0101-Demo-topic.patch", ["name"]),
    ],
)
def test_names_and_numbers(stacked: Project, new: str, expected: list[str]) -> None:
    stacked.patch_file(SECOND).rename(stacked.patch_file(new))
    stacked.series.write_text(stacked.series.read_text().replace(SECOND, new))
    assert codes(stacked, None) + codes(stacked, new) == expected


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ("schema = 1", "schema = 1\nunknown = 1", "unknown"),
        ('name = "second"', 'name = "demo-topic"', "topic listed twice"),
        ("numbers = [200, 209]", "numbers = [150, 209]", "overlap"),
        ("numbers = [200, 209]", "numbers = [209, 200]", "first <= last"),
        (SECOND, FIRST, "patch listed twice"),
        (SECOND, "../" + SECOND, "not a bare file name"),
        ("schema = 1", "schema = ", "not valid TOML"),
    ],
)
def test_a_series_that_is_not_valid(stacked: Project, old: str, new: str, said: str) -> None:
    stacked.series.write_text(stacked.series.read_text().replace(old, new, 1))
    done = stacked.run("lint")
    assert (done.code, done.error["kind"]) == (2, "usage")
    assert said in done.err


def test_a_topic_that_the_series_does_not_have(stacked: Project) -> None:
    text = stacked.series.read_text().replace('topic = "second"', 'topic = "third"')
    stacked.series.write_text(text)
    assert codes(stacked, "0200-second-return-nine-hundred.patch") == ["topic", "topic"]


def test_native_paths_are_noted(stacked: Project) -> None:
    stacked.write("csrc/kernel.cu", "// better\n")
    stacked.write("demo/_custom_ops.py", "import demo.core\n")
    stacked.commit(message("[Kernel] Touch native code"))
    report = stacked.ok("refresh").report
    assert report["ok"]
    findings = stacked.ok("lint").report["targets"][0]["findings"]
    assert [(found["code"], found["level"]) for found in findings] == [("native", "note")] * 2
    assert "csrc/kernel.cu" in findings[0]["message"]
