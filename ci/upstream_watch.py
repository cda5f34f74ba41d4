"""Watch upstream: try the stacks on its latest releases, and tell in one issue per target what comes of it.

``report FOLDER`` asks the package index and writes an issue's text for each target; it needs no GitHub, and
prints the texts. ``publish FOLDER`` brings the issues up to date, by the GitHub CLI. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
LABEL = "upstream-watch"
#: GitHub takes 65,536 characters; what is left out is in the artifact of the run.
_LONGEST = 60_000
#: What a dry run ends with when patches need somebody: the release was found and tried.
_TRIED = (0, 5)


@dataclass(frozen=True)
class Watched:
    """What a run found of one target."""

    target: str
    pinned: str
    latest: str
    title: str
    body: str

    @property
    def is_new(self) -> bool:
        """Whether there is a release that the stack is not on yet."""
        return order(self.latest) > order(self.pinned)


def order(version: str) -> tuple[list[int], bool, list[int]]:
    """Return what a normalized version is sorted by: its numbers, whether it is final, and what follows."""
    release, suffix = re.fullmatch(r"([\d.]*\d)(.*)", version).groups()  # type: ignore[union-attr]
    final = not re.search(r"a|b|rc|dev", suffix)
    return (
        [int(part) for part in release.split(".")],
        final,
        [int(part) for part in re.findall(r"\d+", suffix)],
    )


# -- the report


def report(root: Path, folder: Path, wanted: dict[str, str], *, git: bool) -> int:
    """Try each stack on its latest release (or what ``wanted`` names) and write what was found.

    With ``git`` upstream's repository is used where it can be: its commits are named then.
    Returns the exit status: 1 when a target's release could not be found or read; the others are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Watched] = []
    status = 0
    for target in wanted or dict.fromkeys(targets(root), "latest"):
        done = tried(root, folder, target, wanted.get(target, "latest"), git=git)
        if done is None:
            status = 1
            continue
        found.append(watched(*done))
        one = found[-1]
        print(
            f"{one.title}\n\n{one.body}"
            if one.is_new or target in wanted
            else f"{target}: {nothing_new(one)}"
        )
    (folder / "watch.json").write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")
    return status


def tried(
    root: Path, folder: Path, target: str, wanted: str, *, git: bool
) -> tuple[dict[str, Any], str] | None:
    """Return the report of a dry run, as JSON and as text; None when there is none, which is said."""
    document, text = dry_run(root, folder, target, wanted, "sdist")
    if document is None:
        print(f"{target}: {text}", file=sys.stderr)
        return None
    # Upstream's repository is large: it is asked only when there is something to tell.
    if git and order(document["new_release"]) > order(document["old_release"]):
        better, detailed = dry_run(root, folder, target, wanted, "git")
        if better is not None:
            return better, detailed
        print(f"{target}, without upstream's commits: {detailed}", file=sys.stderr)
        (folder / f"{target}.json").write_text(json.dumps(document, indent=2) + "\n")
    return document, text


def nothing_new(one: Watched) -> str:
    """Say that there is nothing to move to."""
    return f"the stack is on {one.pinned}, the latest release is {one.latest}"


def targets(root: Path) -> list[str]:
    """Return the names of the targets."""
    return sorted(path.stem for path in (root / "upstream").glob("*.toml"))


def dry_run(
    root: Path, folder: Path, target: str, wanted: str, source: str
) -> tuple[dict[str, Any] | None, str]:
    """Return the report of a dry run, as JSON and as text; None, and the error, when there is none."""
    path = folder / f"{target}.json"
    command = [ROOT / "tools" / "vllm-stack", "rebase-upstream", wanted, "--dry-run"]
    done = subprocess.run(
        [
            *map(str, command),
            "--target",
            target,
            "--source",
            source,
            "--root",
            str(root),
            "--json",
            str(path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in _TRIED or not path.is_file():
        return None, done.stderr.strip() or f"exit status {done.returncode}"
    document: dict[str, Any] = json.loads(path.read_text())
    return (document, done.stdout) if "patches" in document else (None, done.stderr.strip())


# -- the text of an issue


def watched(document: dict[str, Any], text: str) -> Watched:
    """Return what a dry run found, with the text for people."""
    target, pinned, latest = (document[key] for key in ("target", "old_release", "new_release"))
    troubled = [patch for patch in document["patches"] if patch["verdict"] not in ("clean", "three-way")]
    state = (
        f"{len(troubled)} of {len(document['patches'])} patches need work"
        if troubled
        else "all patches apply"
    )
    return Watched(target, pinned, latest, f"{target} {latest}: {state}", body(document, text, state))


def body(document: dict[str, Any], text: str, state: str) -> str:
    """Return an issue's text. What upstream wrote stands in code, where it mentions and links nothing."""
    target, pinned, latest = (document[key] for key in ("target", "old_release", "new_release"))
    parts = [
        marker(target),
        f"{code(target)} {latest} is out; the stack is on {pinned}. On {latest} {state}.",
        table(("patch", "verdict"), [(code(one["name"]), one["verdict"]) for one in document["patches"]]),
        *(f"- {code(note)}" for note in document["notes"]),
        others(document),
        "To move the stack:",
        fenced(f"tools/vllm-stack rebase-upstream {latest} --target {target}", "sh"),
    ]
    above = "\n\n".join(part for part in parts if part)
    whole = (
        f"<details>\n<summary>The whole report</summary>\n\n{fenced(cut(text, above), 'text')}\n\n</details>"
    )
    return f"{above}\n\n{whole}\n"


def cut(text: str, above: str) -> str:
    """Return as much of ``text`` as GitHub takes below ``above``."""
    room = max(_LONGEST - len(above), 0)
    return (
        text if len(text) <= room else f"{text[:room]}\n[cut here; all of it is in the artifact of the run]"
    )


def marker(target: str) -> str:
    """Return what tells the issue of a target from all others."""
    return f"<!-- {LABEL}: {target} -->"


def others(document: dict[str, Any]) -> str:
    """Return a table of what upstream pins of others, where that changed."""
    changes = (document.get("third_party") or {}).get("changes", [])
    rows = [
        (
            code(one["name"]),
            *(code(one[key]) if one[key] else "-" for key in ("old", "new")),
            code(one["file"]),
        )
        for one in changes
    ]
    heads = ("what upstream pins", document["old_release"], document["new_release"], "file")
    return table(heads, rows) if rows else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Return ``text`` as a code span, whatever it holds."""
    flat = " ".join(text.split())
    ticks = "`" * (longest_run(flat, "`") + 1)
    space = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{ticks}{space}{flat}{space}{ticks}"


def fenced(text: str, language: str) -> str:
    """Return ``text`` as a block of code that nothing in it can end."""
    fence = "`" * max(3, longest_run(text, "`") + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def longest_run(text: str, character: str) -> int:
    """Return how often ``character`` stands in a row, at most."""
    return max((len(run) for run in re.findall(f"{re.escape(character)}+", text)), default=0)


# -- the issues


def publish(folder: Path) -> None:
    """Open, update or close the issue of each target that was watched."""
    found = [Watched(**one) for one in json.loads((folder / "watch.json").read_text())]
    if not found:
        return
    gh(
        "label",
        "create",
        LABEL,
        "--force",
        "--color",
        "0e8a16",
        "--description",
        "A release of upstream's to move to",
    )
    words = ("--label", LABEL, "--state", "all", "--limit", "200", "--json", "number,title,body,state")
    issues = sorted(json.loads(gh("issue", "list", *words)), key=lambda issue: int(issue["number"]))
    for one in found:
        own = [issue for issue in issues if issue["body"].startswith(marker(one.target))]
        for action in decide(one, own):
            print(f"{one.target}: gh {' '.join(action[:3])}")
            gh(*action, stdin=one.body)


def decide(one: Watched, own: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the commands that bring a target's issue up to date; ``own`` are its issues, oldest first."""
    content = ("--title", one.title, "--body-file", "-")
    opened = [issue for issue in own if issue["state"] == "OPEN"]
    if not one.is_new:
        for issue in opened:
            yield "issue", "close", str(issue["number"]), "--comment", f"Done: {nothing_new(one)}."
        return
    if not opened:
        # An issue about this very release that somebody closed stays closed.
        if not any(issue["title"].startswith(f"{one.target} {one.latest}: ") for issue in own):
            yield "issue", "create", "--label", LABEL, *content
        return
    first, *more = opened
    # GitHub keeps line ends as they were sent, and its own forms send CRLF.
    if (first["title"], first["body"].replace("\r\n", "\n").strip()) != (one.title, one.body.strip()):
        yield "issue", "edit", str(first["number"]), *content
    for issue in more:
        yield "issue", "close", str(issue["number"]), "--comment", f"Told in #{first['number']}."


def gh(*words: str, stdin: str = "") -> str:
    """Run the GitHub CLI and return what it says. Ends the program when it fails."""
    done = subprocess.run(["gh", *words], input=stdin, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"gh {' '.join(words[:2])} failed with exit status {done.returncode}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["report", "publish"])
    parser.add_argument("folder", type=Path, help="where the report lies")
    parser.add_argument("--root", type=Path, default=ROOT, help="stack repository to report on")
    parser.add_argument(
        "--release",
        action="append",
        default=[],
        metavar="TARGET=VERSION",
        help="report on this instead of the latest",
    )
    parser.add_argument("--git", action="store_true", help="name upstream's commits, from its repository")
    given = parser.parse_args(arguments)
    if given.step == "publish":
        publish(given.folder)
        return 0
    wanted = dict(named.partition("=")[::2] for named in given.release)
    return report(given.root, given.folder, wanted, git=given.git)


if __name__ == "__main__":
    sys.exit(main())
