"""Contracts on the pin itself: what people wrote must be true there, or it warns of nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.applying import Outcome, try_stack
from vllm_stack.contracts.check import Comparison, ListedContract
from vllm_stack.replay import PatchPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.base import Base
    from vllm_stack.stack import Stack


@dataclass(frozen=True)
class FalseContract:
    """A written contract that does not hold on the release that the stack is for."""

    patch: str
    contract: str
    expected: str
    found: str


@dataclass(frozen=True)
class PatchContracts:
    """All that a patch relies on, on its own release."""

    patch: str
    contracts: tuple[ListedContract, ...]
    false: tuple[FalseContract, ...]


def contracts_on_pin(base: Base, stack: Stack) -> tuple[PatchContracts, ...]:
    """Return what each patch relies on in its own release, and what it says so wrongly.

    Patches that do not apply to the pin are left out: nothing can be said of them.
    """
    found = []
    for place in places_on_pin(base, stack):
        with Comparison.open(place) as comparison:
            false = tuple(
                FalseContract(place.patch.name, one.contract, one.expected, one.found)
                for one in comparison.written_on_old()
                if one.found is not None
            )
            found.append(PatchContracts(place.patch.name, comparison.listed(), false))
    return tuple(found)


def places_on_pin(base: Base, stack: Stack) -> Iterator[PatchPlace]:
    """Yield where each patch is that applies, as if the release that it is for were the new one too."""
    commit = base.commit
    before = commit
    results = try_stack(base.git, commit, stack.patches)
    for entry, patch, result in zip(stack.series.patches, stack.patches, results, strict=True):
        if result.outcome is Outcome.STRICT and result.commit is not None:
            after = result.commit
            yield PatchPlace(base.git, entry, patch, commit, commit, before, after, before, after)
            before = after
