"""Small upstreams for the tests of contracts: what the patch adds, and what the next release changes."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from tworeleases import TwoReleases

from vllm_stack.applying import apply_patch
from vllm_stack.contracts import Contract, ContractFinding, check_contracts
from vllm_stack.series import SeriesEntry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vllm_stack.replay import PatchPlace

NEW_FILE = "demo/new.py"
_CONTRACT: TypeAdapter[Contract] = TypeAdapter(Contract)


def dedented(files: Mapping[str, str]) -> dict[str, str | bytes]:
    """Return the files with the indentation of the test taken off."""
    return {path: textwrap.dedent(text).lstrip("\n") for path, text in files.items()}


def place_of(
    folder: Path,
    old: Mapping[str, str],
    new: Mapping[str, str],
    patch: Mapping[str, str],
    contracts: tuple[dict[str, Any], ...] = (),
) -> PatchPlace:
    """Make two releases and a patch for the first, apply it to the second, and return its place.

    A file that ``new`` does not name is the same in both releases; an empty text there deletes it.
    """
    before = dedented({"demo/__init__.py": "", **old})
    after = {path: text for path, text in {**before, **dedented(new)}.items() if text or path not in new}
    folder.mkdir(exist_ok=True)
    releases = TwoReleases(folder, before, after)
    releases.add_patch(dedented(patch))
    place = releases.place
    written = tuple(_CONTRACT.validate_python(contract) for contract in contracts)
    entry = SeriesEntry(file=place.patch.name, topic="demo-topic", test="true", contracts=written)
    applied = apply_patch(place.git, place.new_before, place.patch)
    return replace(place, entry=entry, new_after=applied.commit)


def findings(
    folder: Path,
    old: Mapping[str, str],
    new: Mapping[str, str],
    patch: str | Mapping[str, str],
    contracts: tuple[dict[str, Any], ...] = (),
) -> tuple[ContractFinding, ...]:
    """Return what the new release breaks; a text is a new file ``demo/new.py``."""
    files = {NEW_FILE: patch} if isinstance(patch, str) else patch
    return check_contracts(place_of(folder, old, new, files, contracts))
