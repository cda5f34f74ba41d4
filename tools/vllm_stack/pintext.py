"""The text of a candidate pin: the present one with another release in it, comments and layout kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.items import Comment, Null

from vllm_stack.errors import UsageError
from vllm_stack.pins import Pin, PinnedFile, PinnedWheel, parse_pin


@dataclass(frozen=True)
class Facts:
    """What a pin says of a release."""

    release: str
    tag: str
    commit: str | None
    sdist: PinnedFile
    wheels: tuple[PinnedWheel, ...]
    lacks: tuple[str, ...] = ()
    """Why these are not enough for a pin; empty when they are."""

    @classmethod
    def of(cls, pin: Pin) -> Facts:
        """Return what ``pin`` says."""
        return cls(pin.release, pin.tag, pin.commit, pin.sdist, pin.wheels)


def tag_of(pin: Pin, release: str) -> str:
    """Return what upstream calls the tag of another release, going by the tag of the pinned one.

    UsageError when the pinned tag does not hold its release.
    """
    if pin.release not in pin.tag:
        raise UsageError(
            f"the tag {pin.tag} does not hold the release {pin.release}",
            hint="the tag of another release cannot be told from it; write it into the pin by hand",
        )
    return pin.tag.replace(pin.release, release)


def candidate_pin(present: Pin, text: str, facts: Facts) -> tuple[Pin, str]:
    """Return the candidate pin and its text, made from the text of the ``present`` one.

    Of facts that lack something, the text says what, and it is none that a command would take for a pin.
    """
    document = tomlkit.parse(text)
    document["release"] = facts.release
    document["tag"] = facts.tag
    _set_commit(document, facts.commit)
    if facts.lacks:
        for table in ("sdist", "wheels"):
            document.pop(table, None)
        reasons = "".join(f"#   {reason}\n" for reason in facts.lacks)
        unfinished = f"# Not a pin, for lack of files that could be fetched and verified:\n{reasons}"
        return _draft(present, facts), unfinished + tomlkit.dumps(document)
    _set_files(document, facts)
    changed = tomlkit.dumps(document)
    return parse_pin(changed, source=f"the candidate pin of {present.distribution} {facts.release}"), changed


def _draft(present: Pin, facts: Facts) -> Pin:
    """Return a pin object that says what is known; only its base is of use."""
    known = {"release": facts.release, "tag": facts.tag, "commit": facts.commit}
    return present.model_copy(update={**known, "sdist": facts.sdist, "wheels": facts.wheels})


def _set_files(document: tomlkit.TOMLDocument, facts: Facts) -> None:
    _set_file(document["sdist"], facts.sdist)
    wheels = {wheel.arch: wheel for wheel in facts.wheels}
    for table in document["wheels"]:
        _set_file(table, wheels[str(table["arch"])])  # type: ignore[index]


def _set_file(table: Any, file: PinnedFile) -> None:
    for key in ("filename", "sha256", "size"):
        table[key] = getattr(file, key)


def _set_commit(document: tomlkit.TOMLDocument, commit: str | None) -> None:
    if commit is not None:
        document["commit"] = commit
    elif "commit" in document:
        _remove_comment_above(document, "commit")
        document.remove("commit")


def _remove_comment_above(document: tomlkit.TOMLDocument, key: str) -> None:
    """Remove the comment lines that stand directly above ``key``: they are about its value."""
    body = document.body
    place = next(number for number, (name, _) in enumerate(body) if name is not None and name.key == key)
    while place and isinstance(body[place - 1][1], Comment):
        place -= 1
        body[place] = (None, Null())
