"""Broken contracts in reports: as a person reads them, as JSON, and with the commits behind them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contractkit import NEW_FILE, place_of
from rich.console import Console

from vllm_stack.contracts import ContractFinding, check_contracts
from vllm_stack.contracts.view import render_contracts
from vllm_stack.gitsource import UpstreamCommit
from vllm_stack.report import to_plain

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_stack.gitsource import History

OLD = "class Base:\n    def hook(self, a, counts):\n        pass\n\n    def other(self):\n        pass\n"
NEW = OLD.replace("(self, a, counts)", "(self, a, *, layer)")
PATCH = "from demo.up import Base\n\n\nclass D(Base):\n    def hook(self, a, counts):\n        pass\n"
COMMIT = UpstreamCommit("0123456789abcdef", "[Core] Name the layer (#4711)", 4711, "2026-01-31")


@dataclass
class Asked:
    """Stands in for a clone of upstream: remembers what was asked of it."""

    questions: list[tuple[str, range]]

    def touching(self, path: str, old_lines: range) -> tuple[UpstreamCommit, ...]:
        """Return the commits between the releases that touched lines of the old one."""
        self.questions.append((path, old_lines))
        return (COMMIT,)


def rendered(findings: tuple[ContractFinding, ...]) -> str:
    """Return what a person sees, in a log."""
    out = io.StringIO()
    render_contracts(Console(file=out, soft_wrap=True, highlight=False), "0100-demo.patch", findings)
    return out.getvalue()


def test_for_people(tmp_path: Path) -> None:
    contract = {"kind": "name", "module": "demo.up", "name": "Base.other", "why": "it is called by the hook"}
    place = place_of(
        tmp_path,
        {"demo/up.py": OLD},
        {"demo/up.py": NEW.replace("other", "rest")},
        {NEW_FILE: PATCH},
        (contract,),
    )
    assert rendered(check_contracts(place)) == (
        "contract: 0100-demo.patch demo/new.py:5: class demo.up.Base has method hook(self, a, counts) "
        "to override\n"
        "  expected: hook(self, a, counts) in demo.up.Base\n"
        "  found: keyword parameter layer is passed, and the override does not take it; parameter counts of "
        "the override is no longer passed; it is now hook(self, a, *, layer)\n"
        "  upstream changed demo/up.py:2\n"
        "    | @@ -2 +2 @@\n"
        "    | -     def hook(self, a, counts):\n"
        "    | +     def hook(self, a, *, layer):\n"
        "    |           pass\n"
        "\n"
        "contract: 0100-demo.patch series.toml: demo.up defines Base.other\n"
        "  expected: defines Base.other\n"
        "  found: there is no Base.other in demo/up.py; Base is still in demo/up.py:1\n"
        "  upstream changed demo/up.py:5\n"
        "    | @@ -5 +5 @@\n"
        "    | -     def other(self):\n"
        "    | +     def rest(self):\n"
        "    |           pass\n"
        "  note: why it matters: it is called by the hook\n"
        "\n"
    )


def test_many_consequences_are_shortened(tmp_path: Path) -> None:
    body = "".join(f"    def hook_{n}(self):\n        pass\n\n" for n in range(12))
    place = place_of(
        tmp_path,
        {"demo/up.py": f"class Base:\n{body}"},
        {"demo/up.py": "x = 1\n"},
        {NEW_FILE: f"from demo.up import Base\n\n\nclass D(Base):\n{body}"},
    )
    (found,) = check_contracts(place)
    assert len(found.consequences) == 13
    lines = rendered((found,)).splitlines()
    assert [line for line in lines if "hangs on it" in line][-1] == "  note: hangs on it: 5 more"
    assert "    | ... " in "\n".join(lines)


def test_the_commits_behind_it(tmp_path: Path) -> None:
    place = place_of(tmp_path, {"demo/up.py": OLD}, {"demo/up.py": NEW}, {NEW_FILE: PATCH})
    asked = Asked([])
    history: History = asked  # type: ignore[assignment]
    (found,) = check_contracts(place, history)
    assert asked.questions == [("demo/up.py", range(2, 4))]
    assert found.commits == (COMMIT,)
    assert "note: upstream 0123456789ab (#4711, 2026-01-31): [Core] Name the layer\n" in rendered((found,))


def test_as_json(tmp_path: Path) -> None:
    place = place_of(tmp_path, {"demo/up.py": OLD}, {"demo/up.py": NEW}, {NEW_FILE: PATCH})
    (plain,) = json.loads(json.dumps(to_plain(check_contracts(place))))
    assert plain["contract"] == "class demo.up.Base has method hook(self, a, counts) to override"
    assert (plain["origin"], plain["path"], plain["line"], plain["definition"]) == (
        "derived",
        NEW_FILE,
        5,
        "demo/up.py:2",
    )
    assert plain["upstream_change"][2:] == [
        "@@ -2 +2 @@",
        "-    def hook(self, a, counts):",
        "+    def hook(self, a, *, layer):",
        "         pass",
    ]
    assert set(plain) == {
        "contract",
        "origin",
        "path",
        "line",
        "expected",
        "found",
        "why",
        "read_at",
        "consequences",
        "definition",
        "upstream_change",
        "commits",
    }


def test_long_changes_are_cut(tmp_path: Path) -> None:
    long = "".join(f"        x{n} = {n}\n" for n in range(200))
    old = f"class Base:\n    def hook(self):\n{long}\n\nLAST = 1\n"
    place = place_of(
        tmp_path,
        {"demo/up.py": old},
        {"demo/up.py": "LAST = 1\n"},
        {NEW_FILE: "from demo.up import Base\n"},
    )
    (found,) = check_contracts(place)
    assert len(found.upstream_change) == 61
    assert found.upstream_change[-1] == "... 145 more lines"
