"""Explaining conflicts: every way in which upstream can get in a patch's way, on real git."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from tworeleases import Content, Files, TwoReleases

from vllm_stack.conflicts import FileConflict, explain_conflict
from vllm_stack.conflictview import printable, render_conflicts
from vllm_stack.fileversions import FileVersions, Version
from vllm_stack.git import Git, GitError, GitResult
from vllm_stack.history import UpstreamCommit
from vllm_stack.moved import enclosing_definition
from vllm_stack.report import to_plain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vllm_stack.replay import PatchPlace


def function(name: str, *body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body)
    return f"def {name}(values, scale):\n{lines}\n\n"


MODULE = "".join(
    function(name, f"first_{name} = values[0] * scale", f"second_{name} = first_{name} + 1", f"return {name}")
    for name in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
)


def explain(
    tmp_path: Path,
    old: Mapping[str, Content],
    new: Mapping[str, Content],
    change: Mapping[str, Content | None],
) -> tuple[FileConflict, ...]:
    tmp_path.mkdir(exist_ok=True)
    releases = TwoReleases(tmp_path, dict(old), dict(new))
    releases.add_patch(change)
    return explain_conflict(releases.place)


def shown(conflicts: tuple[FileConflict, ...], width: int | None = None) -> str:
    stream = io.StringIO()
    terminal = width is not None
    console = Console(
        file=stream,
        width=width or 80,
        force_terminal=terminal,
        no_color=True,
        soft_wrap=True,
        highlight=False,
    )
    render_conflicts(console, conflicts)
    return stream.getvalue()


def test_only_the_hunk_that_conflicts_is_called_so(tmp_path: Path) -> None:
    wanted = MODULE.replace("second_beta = first_beta + 1", "second_beta = first_beta + 2")
    wanted = wanted.replace("return zeta", "return zeta * 2")
    upstream = "# moved down\n" * 5 + MODULE.replace("first_beta + 1", "first_beta - 1")
    (file,) = explain(tmp_path, {"m.py": MODULE}, {"m.py": upstream}, {"m.py": wanted})
    assert (file.status, file.conflicting, file.new_path) == ("modified", True, "m.py")
    assert (file.old_release, file.new_release) == ("1.0.0", "2.0.0")
    assert [hunk.outcome for hunk in file.hunks] == ["conflict", "applies"]
    hunk = file.hunks[0]
    old, new = hunk.old_upstream, hunk.new_upstream
    assert old
    assert new
    assert old.lines[old.changed[0] - old.start] == "    second_beta = first_beta + 1"
    assert new.lines[new.changed[0] - new.start] == "    second_beta = first_beta - 1"
    assert (old.start, new.start, hunk.line) == (6, 11, 11)
    assert MODULE.splitlines()[old.start - 1] == old.lines[0]
    assert upstream.splitlines()[new.start - 1] == new.lines[0]
    assert "-    second_beta = first_beta + 1" in hunk.upstream_change
    assert "+    second_beta = first_beta - 1" in hunk.upstream_change
    assert not any("moved down" in line for line in hunk.upstream_change)
    assert "+    second_beta = first_beta + 2" in hunk.ours
    text = shown((file,))
    assert "conflict: 0100-demo-change.patch hunk 1 of m.py:11, in `def beta`\n" in text
    assert "  the patch was made for 1.0.0 (~ not in 2.0.0)\n" in text
    assert "   9 | ~     second_beta = first_beta + 1\n" in text
    assert "  upstream 2.0.0 has (~ not in 1.0.0)\n" in text
    assert "  14 | ~     second_beta = first_beta - 1\n" in text
    assert "    | +     second_beta = first_beta + 2\n" in text
    assert "help: make the patch's change to the lines at m.py:11\n" in text
    assert "note: no conflict: 0100-demo-change.patch hunk 2 (line 36) of m.py\n" in text


def test_a_patch_that_applies_has_no_conflict(tmp_path: Path) -> None:
    conflicts = explain(
        tmp_path,
        {"m.py": MODULE},
        {"m.py": "import os\n" + MODULE},
        {"m.py": MODULE.replace("return beta", "return 2"), "n.py": "new\n"},
    )
    assert [file.conflicting for file in conflicts] == [False, False]
    assert [file.status for file in conflicts] == ["modified", "added"]
    assert "conflict:" not in shown(conflicts).replace("no conflict:", "")


def test_a_hunk_that_seems_to_be_there_is_in_doubt_while_the_rest_applies(tmp_path: Path) -> None:
    wanted = MODULE.replace("return beta", "return 2").replace("return zeta", "return 0")
    larger = MODULE.replace("return beta", "return 2").replace("first_beta + 1", "first_beta - 1")
    (file,) = explain(tmp_path, {"m.py": MODULE}, {"m.py": larger}, {"m.py": wanted})
    assert [hunk.outcome for hunk in file.hunks] == ["doubtful", "applies"]
    assert file.conflicting
    assert "m.py: upstream seems to have 1 of the hunks, within a larger change" in file.notes


def test_a_hunk_that_is_there_already_is_said_to_be(tmp_path: Path) -> None:
    wanted = MODULE.replace("return beta", "return 2").replace("return zeta", "return 0")
    taken = "# head\n" + MODULE.replace("return beta", "return 2")
    (file,) = explain(tmp_path / "part", {"m.py": MODULE}, {"m.py": taken}, {"m.py": wanted})
    assert [hunk.outcome for hunk in file.hunks] == ["absorbed", "applies"]
    assert "hunks 1 (line 8, there already), 2 (line 32) of m.py\n" in shown((file,))
    # All of it, with a neighbour changed as well.
    whole = wanted.replace("first_beta + 1", "first_beta - 1")
    (file,) = explain(tmp_path / "all", {"m.py": MODULE}, {"m.py": whole}, {"m.py": wanted})
    assert [hunk.outcome for hunk in file.hunks] == ["absorbed", "absorbed"]
    assert not file.conflicting


def test_a_file_that_was_renamed_is_followed(tmp_path: Path) -> None:
    upstream = MODULE.replace("second_beta = first_beta + 1", "second_beta = first_beta - 1")
    wanted = MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")
    wanted = wanted.replace("return zeta", "return 0")
    (file,) = explain(tmp_path, {"m.py": MODULE}, {"lib/other.py": upstream}, {"m.py": wanted})
    assert (file.status, file.new_path, file.conflicting) == ("renamed", "lib/other.py", True)
    assert file.similarity is not None
    assert 80 < file.similarity < 100
    assert [hunk.outcome for hunk in file.hunks] == ["conflict", "applies"]
    text = shown((file,))
    assert "conflict: 0100-demo-change.patch: m.py: under another name in 2.0.0\n" in text
    assert f"note: 2.0.0 has it as lib/other.py ({file.similarity} % the same)\n" in text
    assert "help: make the change in lib/other.py: 1 of 2 hunks fit there\n" in text
    assert "hunk 1 of lib/other.py:6, in `def beta`\n" in text


def test_a_file_that_was_deleted_names_what_the_patch_goes_for(tmp_path: Path) -> None:
    wanted = {"m.py": MODULE.replace("return beta", "return 2")}
    (file,) = explain(tmp_path, {"m.py": MODULE, "x.py": "x\n"}, {"x.py": "x\n"}, wanted)
    assert (file.status, file.new_path, file.conflicting) == ("deleted", None, True)
    assert file.hunks[0].new_upstream is None
    text = shown((file,))
    assert "m.py: not in 2.0.0\n" in text
    assert "note: 2.0.0 does not have it, nor a file that is half the same\n" in text
    assert "help: leave the file out, or change what took its place; the whole patch goes when" in text


def test_a_file_that_both_delete_leaves_nothing_to_do(tmp_path: Path) -> None:
    (file,) = explain(tmp_path, {"m.py": MODULE, "x.py": "x\n"}, {"x.py": "x\n"}, {"m.py": None})
    assert file.status == "deleted"
    assert file.notes == ("2.0.0 does not have it either",)


def test_a_function_that_moved_to_another_file_is_found_by_its_lines(tmp_path: Path) -> None:
    moved = function("beta", "first_beta = values[0] * scale", "second_beta = first_beta + 1", "return beta")
    new = {"m.py": MODULE.replace(moved, ""), "lib/kept.py": "# kept\n\n\n" + moved}
    wanted = MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")
    (file,) = explain(tmp_path, {"m.py": MODULE, "lib/kept.py": "# kept\n"}, new, {"m.py": wanted})
    (hunk,) = file.hunks
    assert hunk.outcome == "conflict"
    assert hunk.elsewhere
    assert (hunk.elsewhere.path, hunk.elsewhere.line) == ("lib/kept.py", 4)
    assert "m.py has no `def beta` in 2.0.0" in hunk.notes
    assert hunk.help[0].startswith("make the change at lib/kept.py:4, which has ")


def test_a_function_that_moved_and_changed_is_found_by_its_name(tmp_path: Path) -> None:
    moved = function("beta", "first_beta = values[0] * scale", "second_beta = first_beta + 1", "return beta")
    rewritten = function("beta", "return scale")
    new = {"m.py": MODULE.replace(moved, ""), "lib/kept.py": "# kept\n\n\n" + rewritten}
    wanted = MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")
    (file,) = explain(tmp_path, {"m.py": MODULE, "lib/kept.py": "# kept\n"}, new, {"m.py": wanted})
    elsewhere = file.hunks[0].elsewhere
    assert elsewhere
    assert (elsewhere.path, elsewhere.line, elsewhere.definition) == ("lib/kept.py", 4, "def beta")
    assert file.hunks[0].help == ("make the change at lib/kept.py:4, which has `def beta`",)


def test_files_that_are_searched_are_unpacked_once(tmp_path: Path) -> None:
    kept = "# kept\n\n\n" + function("eta", "first_eta = values[0] * scale", "return first_eta")
    gone = {"m.py": MODULE.replace("_beta", "_other").replace("_delta", "_other")}
    wanted = {"m.py": MODULE.replace("_beta + 1", "_beta + 2").replace("_delta + 1", "_delta + 2")}
    old = {"m.py": MODULE, "lib/kept.py": "# kept\n", "lib/same.py": "SAME = 1\n"}
    releases = TwoReleases(tmp_path, dict(old), {**old, **gone, "lib/kept.py": kept})
    releases.add_patch(wanted)
    (file,) = explain_conflict(releases.place)
    assert [hunk.outcome for hunk in file.hunks] == ["conflict", "conflict"]
    (pack,) = (tmp_path / "releases.git" / "objects" / "pack").glob("*.pack")
    packed = pack.read_bytes()
    assert packed.count(kept.encode()) == 1
    assert packed.count(gone["m.py"].encode()) == 1
    assert b"SAME = 1" not in packed


def test_where_there_is_no_room_to_unpack_files_they_are_searched_as_they_are(tmp_path: Path) -> None:
    moved = function("beta", "first_beta = values[0] * scale", "second_beta = first_beta + 1", "return beta")
    kept = "# kept\n" * 50_000 + moved
    new = {"m.py": MODULE.replace(moved, ""), "lib/kept.py": kept}
    releases = TwoReleases(tmp_path, {"m.py": MODULE, "lib/kept.py": "# kept\n"}, dict(new))
    releases.add_patch({"m.py": MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")})
    place = releases.place
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) // 2, before[1]))
    try:
        (file,) = explain_conflict(place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.hunks[0].elsewhere
    assert (file.hunks[0].elsewhere.path, file.hunks[0].elsewhere.line) == ("lib/kept.py", 50_001)
    assert list((tmp_path / "releases.git" / "objects" / "pack").iterdir()) == []


def moved_to_another_file(folder: Path) -> PatchPlace:
    """Return a conflict whose function is in another file of the new release."""
    moved = function("beta", "first_beta = values[0] * scale", "second_beta = first_beta + 1", "return beta")
    new = {"m.py": MODULE.replace(moved, ""), "lib/kept.py": "# kept\n" + moved}
    releases = TwoReleases(folder, {"m.py": MODULE, "lib/kept.py": "# kept\n"}, dict(new))
    releases.add_patch({"m.py": MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")})
    return releases.place


@pytest.mark.parametrize(
    ("said", "had_room"),
    [
        (". Out of diskspace", False),
        (f": {os.strerror(errno.ENOSPC)}", False),
        (f": {os.strerror(errno.EDQUOT)}", False),
        (f": {os.strerror(errno.EIO)}", True),
    ],
)
def test_only_a_git_that_says_so_had_no_room_to_unpack_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, *, had_room: bool
) -> None:
    place = moved_to_another_file(tmp_path)
    run = Git.run

    def failing(self: Git, *words: Any, **options: Any) -> GitResult:
        if "pack-objects" not in words:
            return run(self, *words, **options)
        (tmp_path / "releases.git" / "objects" / "pack" / "tmp_pack_1").touch()
        return GitResult(words, 128, b"", f"fatal: sha1 file 'tmp_pack_1' write error{said}\n".encode())

    monkeypatch.setattr(Git, "run", failing)
    if had_room:
        with pytest.raises(GitError, match=r"pack-objects .* failed with exit status 128"):
            explain_conflict(place)
    else:
        (file,) = explain_conflict(place)
        assert file.hunks[0].elsewhere
    assert list((tmp_path / "releases.git" / "objects" / "pack").iterdir()) == []


def test_a_git_that_cannot_unpack_files_is_not_taken_for_one_without_room(tmp_path: Path) -> None:
    place = moved_to_another_file(tmp_path)
    packs = tmp_path / "releases.git" / "objects" / "pack"
    packs.rmdir()
    packs.write_text("in the way")
    with pytest.raises(GitError, match="pack-objects") as caught:
        explain_conflict(place)
    assert "Not a directory" in caught.value.details[-1]


def test_a_search_that_fails_is_not_taken_for_one_that_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = moved_to_another_file(tmp_path)
    run = Git.run

    def killed(self: Git, *words: Any, **options: Any) -> GitResult:
        done = run(self, *words, **options)
        return replace(done, returncode=-9, stdout=b"") if words[0] == "grep" else done

    monkeypatch.setattr(Git, "run", killed)
    with pytest.raises(GitError, match=r"git grep .* failed with exit status -9"):
        explain_conflict(place)


def test_lines_that_an_unchanged_file_has_too_are_no_move(tmp_path: Path) -> None:
    gone = function("beta", "first_beta = values[0] * scale", "second_beta = first_beta + 1", "return beta")
    other = {"lib/always.py": "# always\n" + gone}
    wanted = {"m.py": MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")}
    new = {"m.py": MODULE.replace(gone, ""), **other}
    (file,) = explain(tmp_path, {"m.py": MODULE, **other}, new, wanted)
    assert file.hunks[0].elsewhere is None


@pytest.mark.parametrize("end", ["last = 10", "last = 10\n", "", "last = 1\nmore"])
def test_a_hunk_alone_gives_the_bytes_of_the_patch(tmp_path: Path, end: str) -> None:
    releases = TwoReleases(tmp_path, {"m.py": MODULE + "last = 1"}, {"m.py": "theirs\n"})
    (file,) = releases.add_patch({"m.py": MODULE + end}).files
    place = releases.place
    made_for = Version(place.git, place.old_before, "m.py")
    versions = FileVersions(made_for, made_for, None, None)
    assert versions._with(file.hunks[0]) == place.git.blob(place.old_after, "m.py")


def test_hunks_that_are_tried_together_become_what_each_becomes_alone(tmp_path: Path) -> None:
    """More than ten, so that their numbers as names are not in the order of numbers."""
    names = [f"part{number}" for number in range(12)]
    bodies = {
        name: function(name, f"first_{name} = values", *[f"{name}_{at} = {at}" for at in range(9)])
        for name in names
    }
    ours, theirs = dict(bodies), dict(bodies)
    for number, name in enumerate(names):
        ours[name] = bodies[name].replace(f"{name}_4 = 4", f"{name}_4 = 40")
        theirs[name] = [bodies[name], ours[name], bodies[name].replace(f"{name}_4 = 4", f"{name}_4 = 1")][
            number % 3
        ]
    releases = TwoReleases(tmp_path, {"m.py": "".join(bodies.values())}, {"m.py": "".join(theirs.values())})
    (file,) = releases.add_patch({"m.py": "".join(ours.values())}).files
    place = releases.place
    versions = FileVersions(
        Version(place.git, place.old_before, "m.py"), Version(place.git, place.new_before, "m.py"), None, None
    )
    together = versions.try_hunks(file.hunks)
    assert together == tuple(versions.try_hunks([hunk])[0] for hunk in file.hunks)
    assert together == ("applies", "absorbed", "conflict") * 4
    assert versions.try_hunks([]) == ()


def test_of_places_that_are_equally_good_the_first_is_named(tmp_path: Path) -> None:
    gone = function("beta", "first_beta = values[0] * scale", "second_beta = first_beta + 1", "return beta")
    wanted = {"m.py": MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")}
    others = {f"a{number}.py": "nothing = 0\n" for number in range(10)}
    copies = dict.fromkeys(("b.py", "a2.py", "a2.txt"), f"# new\n{gone}")
    new = {"m.py": MODULE.replace(gone, ""), **others, **copies}
    (file,) = explain(tmp_path, {"m.py": MODULE}, new, wanted)
    elsewhere = file.hunks[0].elsewhere
    assert elsewhere
    assert (elsewhere.path, elsewhere.line) == ("a2.py", 2)


def test_lines_that_are_gone_show_what_is_around_their_place(tmp_path: Path) -> None:
    gone = function("beta", "first_beta = values[0] * scale", "second_beta = first_beta + 1", "return beta")
    wanted = MODULE.replace("second_beta = first_beta + 1", "second_beta = 0")
    (file,) = explain(tmp_path, {"m.py": MODULE}, {"m.py": MODULE.replace(gone, "")}, {"m.py": wanted})
    (hunk,) = file.hunks
    assert hunk.new_upstream
    assert hunk.new_upstream.lines
    assert hunk.elsewhere is None
    assert "m.py has no `def beta` in 2.0.0" in hunk.notes
    assert hunk.help[0].startswith("2.0.0 does not have what the hunk changes: leave the hunk out")


def test_a_place_whose_lines_stand_alone_is_shown_with_what_is_around(tmp_path: Path) -> None:
    body = [f"step_{n} = compute_step(values, {n})" for n in range(8)]
    old = "# head\n" * 9 + function("alpha", *body) + MODULE
    new = "# head\n" * 9 + function("alpha", "return other_way(values)", body[3], "done(values)") + MODULE
    wanted = old.replace("compute_step(values, 3)", "compute_step(values, 4)")
    (file,) = explain(tmp_path, {"m.py": old}, {"m.py": new}, {"m.py": wanted})
    (hunk,) = file.hunks
    assert (hunk.outcome, hunk.within) == ("conflict", "def alpha")
    assert "`def alpha` begins at m.py:10 in 2.0.0" in hunk.notes
    assert hunk.new_upstream
    assert "def alpha(values, scale):" in hunk.new_upstream.lines


def test_our_new_file_that_exists_upstream_is_compared_with_it(tmp_path: Path) -> None:
    ours = MODULE.replace("return beta", "return 2")
    (file,) = explain(tmp_path, {"x.py": "x\n"}, {"x.py": "x\n", "m.py": MODULE}, {"m.py": ours})
    assert (file.status, file.new_path, file.conflicting) == ("appeared", "m.py", True)
    (hunk,) = file.hunks
    assert hunk.old_upstream is None
    assert hunk.new_upstream
    assert hunk.new_upstream.lines == tuple(MODULE.splitlines())
    assert "-    return 2" in hunk.upstream_change
    assert "+    return beta" in hunk.upstream_change
    count = len(MODULE.splitlines())
    assert file.notes == (f"{count - 1} of the {count} lines of our file are in upstream's",)
    assert "m.py: the name is taken in 2.0.0\n" in shown((file,))


@pytest.mark.parametrize(
    ("new", "note"),
    [
        ({"m.py/inner.py": "x\n"}, "2.0.0 has a folder of this name"),
        ({"m.py": MODULE}, "2.0.0 has the very same file"),
    ],
)
def test_our_new_name_may_be_taken_otherwise(tmp_path: Path, new: Files, note: str) -> None:
    (file,) = explain(tmp_path, {"x.py": "x\n"}, {"x.py": "x\n", **new}, {"m.py": MODULE})
    assert file.status == "appeared"
    assert file.notes == (note,)


def test_a_file_where_our_folder_should_be(tmp_path: Path) -> None:
    (file,) = explain(tmp_path, {"x.py": "x\n"}, {"x.py": "x\n", "lib": "x\n"}, {"lib/new.py": MODULE})
    assert (file.status, file.conflicting) == ("appeared", True)
    assert file.notes == ("2.0.0 has a file lib, where the patch needs a folder",)


ENUM = "class Kind(Enum):\n" + "".join(
    f"    KIND_NUMBER_{n} = 'package.module_{n}.Class'\n" for n in range(6)
)


@pytest.mark.parametrize(
    ("old", "new", "wanted", "note"),
    [
        (
            MODULE,
            MODULE.replace("\n", "\r\n"),
            MODULE.replace("return beta", "return 2"),
            "only the line endings differ: upstream's are CRLF now",
        ),
        (
            MODULE,
            MODULE.replace("    ", "  "),
            MODULE.replace("return beta", "return 2"),
            "only white space and line breaks differ",
        ),
        (
            ENUM,
            "class Kind(Enum):\n" + "".join(f"{line}\n" for line in reversed(ENUM.splitlines()[1:])),
            ENUM.replace("package.module_2.", "package.ours."),
            "the same lines, in another order",
        ),
    ],
)
def test_the_kind_of_change_is_named(tmp_path: Path, old: str, new: str, wanted: str, note: str) -> None:
    (file,) = explain(tmp_path, {"m.py": old}, {"m.py": new}, {"m.py": wanted})
    assert file.conflicting
    assert note in file.hunks[0].notes


def test_what_upstream_took_of_a_hunk_is_counted(tmp_path: Path) -> None:
    wanted = MODULE.replace("return beta", "third_beta = first_beta * 3\n    return third_beta")
    upstream = MODULE.replace("return beta", "third_beta = first_beta * 3\n    return beta + third_beta")
    (file,) = explain(tmp_path, {"m.py": MODULE}, {"m.py": upstream}, {"m.py": wanted})
    assert "1 of the 2 different lines that the hunk adds are there already" in file.hunks[0].notes


def test_an_addition_at_the_end_shows_what_upstream_added_there(tmp_path: Path) -> None:
    old = "first = 1\nsecond = 2\nthird = 3\n"
    (file,) = explain(tmp_path, {"m.py": old}, {"m.py": f"{old}upstream = 4\n"}, {"m.py": f"{old}ours = 4\n"})
    (hunk,) = file.hunks
    assert hunk.outcome == "conflict"
    assert hunk.new_upstream
    assert hunk.new_upstream.lines[-1] == "upstream = 4"
    assert "+upstream = 4" in hunk.upstream_change


def test_lines_of_earlier_patches_are_named_with_their_patch(tmp_path: Path) -> None:
    releases = TwoReleases(
        tmp_path, {"m.py": MODULE}, {"m.py": MODULE.replace("first_beta + 1", "first_beta - 1")}
    )
    once = "# ours\n" + MODULE.replace("first_beta + 1", "first_beta + 2")
    releases.add_patch({"m.py": once}, "[Demo] Add two")
    releases.add_patch({"m.py": once.replace("first_beta + 2", "first_beta + 3")}, "[Demo] Add three")
    (file,) = explain_conflict(releases.place)
    (hunk,) = file.hunks
    assert hunk.outcome == "conflict"
    assert "numbers count the stack's earlier patches; bare, these are lines 6-12" in hunk.notes
    assert "an earlier patch wrote some of these lines: [Demo] Add two" in hunk.notes


def test_a_file_of_an_earlier_patch_that_is_not_applied(tmp_path: Path) -> None:
    releases = TwoReleases(tmp_path, {"m.py": MODULE}, {"m.py": MODULE.replace("return beta", "return 3")})
    releases.add_patch({"m.py": MODULE.replace("return beta", "return 2"), "n.py": MODULE})
    releases.add_patch({"n.py": MODULE.replace("return beta", "return 2")})
    (file,) = explain_conflict(releases.place)
    assert (file.status, file.conflicting) == ("missing", True)
    assert file.help == ("mend that patch first, then this one applies",)
    assert "not there on 2.0.0" in shown((file,))


def test_a_place_that_cannot_be_told_is_a_doubt_not_a_conflict(tmp_path: Path) -> None:
    block = "    value = compute()\n    check(value)\n    store(value)\n    done()\n    return value\n"
    old = f"def alpha():\n{block}\n\n" + "x = 1\n" * 8
    new = f"def other():\n{block}\n\n" + "x = 1\n" * 8 + f"def alpha():\n{block}"
    wanted = old.replace("store(value)", "store(value, 1)")
    (file,) = explain(tmp_path, {"m.py": old}, {"m.py": new}, {"m.py": wanted})
    assert file.conflicting
    assert [hunk.outcome for hunk in file.hunks] == ["doubtful"]
    assert file.notes
    assert "doubt: 0100-demo-change.patch hunk 1 of m.py:" in shown((file,))


@pytest.mark.parametrize(
    ("line", "definition"),
    [
        (0, None),
        (2, "class Outer"),
        (4, "def Outer.method"),
        (7, "def Outer.method"),
        (9, "def Outer.method.inner"),
        (11, "def Outer.method"),
        (13, None),
        (15, "def last"),
    ],
)
def test_the_definition_around_a_line(line: int, definition: str | None) -> None:
    text = """\
import os
class Outer:
    field = 1

    async def method(
        self,
    ) -> None:
        first = [
# a comment at the margin
        def inner(): return 1
        ]
        last = 2

VALUE = [
]
def last(
    argument,
): return 1
"""
    found = enclosing_definition(text.splitlines(), line)
    assert (str(found) if found else None) == definition


def test_a_method_is_looked_for_in_its_own_class(tmp_path: Path) -> None:
    methods = [f"    def __init__(self):\n        self.value_of_{n} = {n}\n\n" for n in range(3)]
    old = "".join(f"class Kind{n}:\n{method}" for n, method in enumerate(methods))
    new = old.replace("        self.value_of_2 = 2\n", "        return\n")
    (file,) = explain(tmp_path, {"m.py": old}, {"m.py": new}, {"m.py": old.replace("= 2", "= 3")})
    (hunk,) = file.hunks
    assert (hunk.outcome, hunk.within) == ("conflict", "def Kind2.__init__")


class Known:
    """A history that knows who touched line 8 of m.py."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, range]] = []

    def touching(self, path: str, old_lines: range) -> Any:
        """Note what was asked."""
        self.asked.append((path, old_lines))
        return (
            UpstreamCommit(
                id="ab" * 20,
                subject="[Core] Subtract\x1b[31m (#4711)",
                pull_request=4711,
                date=date(2026, 1, 31).isoformat(),
            ),
        )


def test_commits_are_asked_for_in_lines_of_the_bare_old_release(tmp_path: Path) -> None:
    upstream = MODULE.replace("first_beta + 1", "first_beta - 1")
    upstream = upstream.replace("    first_zeta", "    # said\n    first_zeta")
    releases = TwoReleases(tmp_path, {"m.py": MODULE}, {"m.py": upstream})
    before = "# ours\n# ours\n" + MODULE
    releases.add_patch({"m.py": before}, "[Demo] Head")
    releases.add_patch({"m.py": before.replace("first_beta + 1", "0").replace("return zeta", "return 0")})
    known: Any = Known()
    (file,) = explain_conflict(releases.place, known)
    assert known.asked == [("m.py", range(6, 13))]
    assert [bool(hunk.commits) for hunk in file.hunks] == [True, False]
    text = shown((file,))
    assert "note: upstream abababababab (#4711, 2026-01-31): [Core] Subtract\\x1b[31m\n" in text
    assert "\x1b" not in text
    explain_conflict(releases.place, known, all_commits=True)
    assert len(known.asked) == 3


def test_everything_survives_as_json(tmp_path: Path) -> None:
    wanted = {"m.py": MODULE.replace("first_beta + 1", "0"), "n.py": "x\n", "gone.py": None}
    old = {"m.py": MODULE, "gone.py": "x\n"}
    new: Files = {
        "m.py": MODULE.replace("first_beta + 1", "1").encode() + b"\xff\n",
        "n.py": "y\n",
        "gone.py": "z\n",
    }
    conflicts = explain(tmp_path, old, new, wanted)
    document = json.loads(json.dumps(to_plain(conflicts)))
    assert {file["path"]: file["status"] for file in document} == {
        "gone.py": "modified",
        "m.py": "modified",
        "n.py": "appeared",
    }
    assert all(file["conflicting"] for file in document)


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_terminal_of_any_width_is_not_overrun(tmp_path: Path, width: int) -> None:
    long = "x" * 300
    old = MODULE.replace("return beta", f"return beta  # {long}")
    new = old.replace("first_beta + 1", "first_beta - 1")
    wanted = old.replace("first_beta + 1", "first_beta + 2")
    text = shown(explain(tmp_path, {"m.py": old}, {"m.py": new}, {"m.py": wanted}), width)
    code = [line for line in text.splitlines() if " | " in line]
    assert code
    assert all(len(line) <= width for line in code)
    assert long not in text
    assert long in shown(explain(tmp_path / "log", {"m.py": old}, {"m.py": new}, {"m.py": wanted}))


def test_a_long_section_keeps_the_changed_lines_and_counts_the_rest(tmp_path: Path) -> None:
    old = "".join(f"line_{n} = {n}\n" for n in range(60))
    wanted = old + "".join(f"added_{n} = {n}\n" for n in range(90))
    text = shown(explain(tmp_path, {"m.py": old}, {"m.py": old + "theirs = 1\n"}, {"m.py": wanted}))
    assert "added_0 = 0" in text
    assert "added_89 = 89" in text
    assert "added_50" not in text
    assert "... 69 lines more ..." in text
    assert "~ theirs = 1" in text


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("a\tb", "a   b"),
        ("red\x1b[31m", "red\\x1b[31m"),
        ("ends\r", "ends\\r"),
        ("bidi\u202e", "bidi\\u202e"),
        ("ünï 漢", "ünï 漢"),
        ("lone\udcff", "lone\\udcff"),
    ],
)
def test_nothing_of_upstreams_text_steers_the_terminal(raw: str, safe: str) -> None:
    assert printable(raw) == safe
