"""Files that a stack makes and a release lacks: one look at all of them gives what a look for each gave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from stackproject import message
from tworeleases import TwoReleases, commit_files

from vllm_stack.applying import Outcome, try_stack
from vllm_stack.carrying import Attempt, carry
from vllm_stack.git import Git, GitResult
from vllm_stack.ownfiles import OwnFiles

if TYPE_CHECKING:
    from pathlib import Path

    from tworeleases import Files

BASE = "".join(f"def base_{n}(value):\n    return value - {n}\n\n\n" for n in range(20))
OWN = "".join(f"def function_{n}(value):\n    return value * {n}\n\n\n" for n in range(20))
CHANGED = OWN.replace("value * 7\n", "value * 77\n")
OTHER = "".join(f"OTHER_{n} = {n * n}\n" for n in range(60))
FILES: Files = {"demo/base.py": BASE}


class Carried:
    """The second patch of a stack on a release that lacks the first one, which makes a file of OWN."""

    def __init__(self, folder: Path, new: Files, old: Files | None = None) -> None:
        self.releases = TwoReleases(folder, old or FILES, new)
        self.here = self.releases.new_base

    def first(self, **changes: str | None) -> None:
        """Add the patch that makes the file."""
        self.releases.add_patch({"demo/own.py": OWN} | _paths(changes))

    def second(self, monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> tuple[Attempt, Attempt, bool]:
        """Carry one more patch, without and with what is known of the stack's own files.

        Also say whether git was kept from looking for renames.
        """
        releases = self.releases
        before = releases.head
        patch = releases.add_patch(_paths(changes) if changes else {"demo/own.py": CHANGED})
        git = releases.git
        made = try_stack(git, releases.old_base, releases.patches)
        own = OwnFiles(git, releases.old_base, releases.new_base, made)
        plain = carry(git, patch, before, releases.head, self.here)
        merges: list[tuple[str, ...]] = []
        run = Git.run

        def recorded(self: Git, *words: Any, **options: Any) -> GitResult:
            if "merge-tree" in words:
                merges.append(words)
            return run(self, *words, **options)

        monkeypatch.setattr(Git, "run", recorded)
        known = carry(git, patch, before, releases.head, self.here, own)
        (words,) = merges
        return plain, known, "merge.renameLimit=1" in words


def _paths(changes: dict[str, str | None]) -> dict[str, str | bytes | None]:
    return {f"{name.replace('__', '/')}.py": text for name, text in changes.items()}


def with_renames(carried: Carried, monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> Attempt:
    """Return what carrying the second patch gives, for which git looked for renames in either case."""
    plain, known, kept_from = carried.second(monkeypatch, **changes)
    assert not kept_from
    assert known == plain
    return known


def test_a_file_that_upstream_has_nothing_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = Carried(tmp_path, {**FILES, "demo/other.py": OTHER})
    carried.first()
    plain, known, kept_from = carried.second(monkeypatch)
    assert kept_from
    assert known == plain
    assert plain.outcome is Outcome.CONFLICT
    assert plain.messages == ("demo/own.py: the new release does not have it any more",)


def test_a_file_that_upstream_has_by_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = OWN.replace("value * 11\n", "value * 12\n")
    carried = Carried(tmp_path, {**FILES, "demo/other.py": OTHER, "demo/taken.py": taken})
    carried.first()
    known = with_renames(carried, monkeypatch)
    assert known.outcome is Outcome.THREE_WAY
    assert known.tree is not None
    text = carried.releases.git.blob(known.tree, "demo/taken.py").decode()
    assert text == taken.replace("value * 7\n", "value * 77\n")


def test_a_file_that_a_resolution_made_by_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new: Files = {**FILES, "demo/other.py": OTHER}
    carried = Carried(tmp_path, new)
    carried.first()
    resolved = {**new, "demo/resolved.py": OWN}
    carried.here = commit_files(carried.releases.git, resolved, message("[Demo] x"), carried.here)
    assert with_renames(carried, monkeypatch).outcome is Outcome.THREE_WAY


def test_a_file_like_one_that_the_stack_takes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old: Files = {**FILES, "demo/old.py": OWN}
    carried = Carried(tmp_path, {**old, "demo/other.py": OTHER}, old)
    carried.first(demo__old=None)
    assert with_renames(carried, monkeypatch).outcome is Outcome.THREE_WAY


@pytest.mark.parametrize(
    "changes",
    [
        # The patch moves the file, puts one where upstream has one, or into a folder that upstream moved.
        {"demo__own": None, "demo__moved": CHANGED},
        {"demo__own": CHANGED, "demo__other": BASE},
        {"demo__own": CHANGED, "lib__below__added": "ADDED = 1\n"},
    ],
)
def test_what_has_to_do_with_renames_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None]
) -> None:
    old: Files = {**FILES, "lib/one.py": BASE.replace("base", "one")}
    new: Files = {**FILES, "demo/other.py": OTHER, "libs/one.py": BASE.replace("base", "one")}
    carried = Carried(tmp_path, new, old)
    carried.first()
    assert with_renames(carried, monkeypatch, **changes).outcome is Outcome.CONFLICT


def test_a_file_of_upstreams_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old: Files = {**FILES, "demo/own.py": OWN}
    carried = Carried(tmp_path, {**FILES, "demo/other.py": OTHER}, old)
    carried.releases.add_patch({"demo/more.py": "MORE = 1\n"})
    assert with_renames(carried, monkeypatch).outcome is Outcome.CONFLICT


def test_a_renamed_file_whose_name_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old: Files = {**FILES, "lib/caf\udce9.py": OTHER}
    taken = OTHER.replace("OTHER_7 = 49\n", "OTHER_7 = 50\n")
    carried = Carried(tmp_path, {**FILES, "lib/tea.py": taken}, old)
    carried.first()
    changes = {"demo__own": CHANGED, "lib__caf\udce9": OTHER.replace("OTHER_40 =", "OTHER_FORTY =")}
    known = with_renames(carried, monkeypatch, **changes)
    assert [at.path for at in known.conflicts] == ["demo/own.py"]
