"""``series.toml``: the order of a stack, its topics, and its releases."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Annotated, Literal

import tomlkit
from pydantic import Field, field_validator, model_validator

from vllm_stack.contracts.kinds import Contract
from vllm_stack.tomlfile import Sha256, Strict, parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE_NAME = re.compile(r"^(?P<number>\d{4})-(?P<rest>[a-z0-9][a-z0-9._-]*)\.patch$")
Slug = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]


class Topic(Strict):
    """The part of a stack that goes upstream as one pull request."""

    name: Slug
    numbers: tuple[int, int]
    title: str
    last: int | None = Field(default=None, description="highest number that a dropped patch had")

    @field_validator("numbers")
    @classmethod
    def _range(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 < value[0] <= value[1] <= 9999:  # noqa: PLR2004 - four digits
            raise ValueError("must be [first, last] with 1 <= first <= last <= 9999")
        return value


class SeriesEntry(Strict):
    """One patch of the stack."""

    file: str
    topic: Slug
    test: str = Field(pattern=r"^[^\n]*\S[^\n]*$", description="tests the patch, run in the tree after it")
    contracts: tuple[Contract, ...] = Field(
        default=(), description="what the patch relies on, beyond what is derived from its code"
    )

    @property
    def number(self) -> int | None:
        """The number that the file name begins with."""
        match = FILE_NAME.match(self.file)
        return int(match["number"]) if match else None


class Release(Strict):
    """A stack that was given a number: its wheels are called ``<upstream>+bw.<number>``."""

    upstream: str
    number: int = Field(gt=0)
    stack_id: Sha256


class Dropped(Strict):
    """A patch that left the stack when it moved to another release."""

    file: str
    release: str = Field(description="the release that the stack moved to")
    why: Literal["absorbed", "skipped"]
    reason: str


class Series(Strict):
    """The whole file."""

    series_schema: Literal[1] = Field(alias="schema")
    topics: tuple[Topic, ...] = ()
    patches: tuple[SeriesEntry, ...] = ()
    releases: tuple[Release, ...] = ()
    dropped: tuple[Dropped, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Series:
        _distinct([topic.name for topic in self.topics], "topic")
        _distinct([entry.file for entry in self.patches], "patch")
        _distinct([f"{release.upstream}+bw.{release.number}" for release in self.releases], "release")
        ranges = sorted((topic.numbers, topic.name) for topic in self.topics)
        for (first, name), (second, other) in itertools.pairwise(ranges):
            if second[0] <= first[1]:
                raise ValueError(f"the numbers of topics {name} and {other} overlap")
        return self

    def topic(self, name: str) -> Topic | None:
        """Return the topic of that name."""
        return next((topic for topic in self.topics if topic.name == name), None)


def _distinct(names: list[str], kind: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} listed twice: {', '.join(twice)}")


def parse_series(text: str, *, source: str) -> Series:
    """Parse the text of a series file; ``source`` names it in errors (UsageError)."""
    return parse_toml(Series, text, source=source)


def with_patches(text: str, entries: list[SeriesEntry], dropped: Iterable[str] = ()) -> str:
    """Return the series file with its patches replaced, everything else as it was written.

    An entry that stays keeps its own table, with the comments inside it. The numbers of ``dropped``
    patches are noted at their topics, so that they are not given again.
    """
    document = tomlkit.parse(text)
    old = {table["file"]: table for table in document.get("patches", [])}
    for name in dropped:
        if name in old:
            _retire(document, str(old[name]["topic"]), name)
    tables = tomlkit.aot()
    for entry in entries:
        table = old.get(entry.file)
        if table is None:
            table = tomlkit.table()
            table.update({"file": entry.file, "topic": entry.topic, "test": entry.test})
            if entry.contracts:
                table["contracts"] = _contract_tables(entry)
        tables.append(table)
    document["patches"] = tables
    return _separate_tables(tomlkit.dumps(document))


def _contract_tables(entry: SeriesEntry) -> tomlkit.items.AoT:
    tables = tomlkit.aot()
    for contract in entry.contracts:
        table = tomlkit.table()
        table.update(contract.model_dump(mode="json", exclude_defaults=True))
        tables.append(table)
    return tables


def _retire(document: tomlkit.TOMLDocument, topic: str, name: str) -> None:
    match = FILE_NAME.match(name)
    for table in document.get("topics", []):
        if table["name"] == topic and match:
            table["last"] = max(int(match["number"]), int(table.get("last", 0)))


def _separate_tables(text: str) -> str:
    """Put one empty line before each table, unless a comment stands there, and end in one newline."""
    spaced = re.sub(r"(?m)^([^#\n][^\n]*)\n(?=\[\[)", r"\1\n\n", text)
    return re.sub(r"\n{3,}(?=\[\[)", "\n\n", spaced).rstrip("\n") + "\n"


def with_release(text: str, release: Release) -> str:
    """Return the series file with one release more."""
    return _with_tables(text, "releases", [release])


def with_dropped(text: str, dropped: Iterable[Dropped]) -> str:
    """Return the series file with patches more that left the stack."""
    return _with_tables(text, "dropped", dropped)


def _with_tables(text: str, key: str, items: Iterable[Strict]) -> str:
    document = tomlkit.parse(text)
    for item in items:
        table = tomlkit.table()
        table.update(item.model_dump())
        if key not in document:
            document[key] = tomlkit.aot()
        document[key].append(table)
    return _separate_tables(tomlkit.dumps(document))
