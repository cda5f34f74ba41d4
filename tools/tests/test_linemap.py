"""Mapping lines from one version of a file to another: properties on random files, with real git."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_stack.base import init_repository
from vllm_stack.git import Git
from vllm_stack.linemap import Edit, LineMap, Span, identity, map_lines, unified

#: Few different lines, so that repeated context is the rule.
FILE = st.lists(st.sampled_from(["a", "b", "c", "d", "", "  e"]), max_size=14)


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> Git:
    return init_repository(tmp_path_factory.mktemp("maps") / "r.git", bare=True)


def mapped(git: Git, old: list[str], new: list[str]) -> LineMap:
    blobs = [
        git.run("hash-object", "-w", "--stdin", stdin="".join(f"{line}\n" for line in lines).encode()).text
        for lines in (old, new)
    ]
    return map_lines(git, blobs[0], blobs[1], (len(old), len(new)))


@settings(max_examples=60, deadline=None)
@given(old=FILE, new=FILE)
def test_edits_turn_the_old_file_into_the_new_one(git: Git, old: list[str], new: list[str]) -> None:
    lines = mapped(git, old, new)
    result, at = [], 0
    for edit in lines.edits:
        result += old[at : edit.old.start] + list(edit.new.of(new))
        at = edit.old.stop
    assert result + old[at:] == new


@settings(max_examples=60, deadline=None)
@given(old=FILE, new=FILE, data=st.data())
def test_an_image_holds_all_kept_lines_and_grows_with_the_span(
    git: Git, old: list[str], new: list[str], data: st.DataObject
) -> None:
    lines = mapped(git, old, new)
    start = data.draw(st.integers(0, len(old)))
    span = Span(start, data.draw(st.integers(start, len(old))))
    image = lines.image(span)
    assert 0 <= image.start <= image.stop <= len(new)
    for line in range(span.start, span.stop):
        kept = lines.kept(line)
        if kept is not None:
            assert image.start <= kept < image.stop
            assert new[kept] == old[line]
    if len(span) and span.stop < len(old):
        wider = lines.image(Span(span.start, span.stop + 1))
        assert wider.start == image.start
        assert wider.stop >= image.stop
    assert lines.image(Span(0, len(old))) == Span(0, len(new))
    assert bool(lines.touching(Span(0, len(old)))) == (old != new)


@settings(max_examples=60, deadline=None)
@given(old=FILE, new=FILE)
def test_a_map_there_and_back_returns_every_kept_line(git: Git, old: list[str], new: list[str]) -> None:
    lines = mapped(git, old, new)
    back = lines.inverse()
    kept = [(line, lines.kept(line)) for line in range(len(old))]
    assert all(back.kept(there) == line for line, there in kept if there is not None)
    assert sum(there is not None for _, there in kept) == len(old) - sum(len(e.old) for e in lines.edits)


@settings(max_examples=40, deadline=None)
@given(old=FILE, new=FILE)
def test_the_unified_diff_of_the_whole_file_applies(git: Git, old: list[str], new: list[str]) -> None:
    lines = mapped(git, old, new)
    text = unified(old, new, lines, Span(0, len(old)))
    if not text:
        assert old == new
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "f").write_text("".join(f"{line}\n" for line in old))
        diff = "\n".join(["--- a/f", "+++ b/f", *text, ""])
        words = ("apply", "--unidiff-zero", "-")
        Git(None).run(*words, stdin=diff.encode(), cwd=Path(folder))
        assert Path(folder, "f").read_text() == "".join(f"{line}\n" for line in new)


def test_what_is_put_in_beside_a_span_is_not_part_of_it() -> None:
    lines = LineMap((Edit(Span(2, 2), Span(2, 5)),), 6, 9)
    assert lines.image(Span(2, 4)) == Span(5, 7)
    assert lines.image(Span(0, 2)) == Span(0, 2)
    assert lines.image(Span(1, 4)) == Span(1, 7)
    assert lines.touching(Span(2, 4)) == ()
    assert lines.image(Span(2, 2)) == Span(2, 5)


def test_what_is_put_in_at_an_end_of_the_file_belongs_to_the_lines_there() -> None:
    lines = LineMap((Edit(Span(3, 3), Span(3, 4)),), 3, 4)
    assert lines.image(Span(1, 3)) == Span(1, 4)
    assert lines.touching(Span(1, 3)) == lines.edits
    assert identity(3).image(Span(1, 3)) == Span(1, 3)


def test_only_the_hunks_that_touch_a_span_are_shown() -> None:
    old = [str(n) for n in range(40)]
    new = [*old[:5], "five", *old[6:30], "thirty", *old[31:]]
    lines = LineMap((Edit(Span(5, 6), Span(5, 6)), Edit(Span(30, 31), Span(30, 31))), 40, 40)
    assert unified(old, new, lines, Span(4, 7))[0] == "@@ -3,7 +3,7 @@"
    assert "+thirty" not in unified(old, new, lines, Span(4, 7))
    assert unified(old, new, lines, Span(10, 20)) == ()
