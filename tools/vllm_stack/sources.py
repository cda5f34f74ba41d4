"""From a pin to a base: the cached import, or the verified download and a new import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_stack.base import Base
from vllm_stack.fetch import Fetcher

if TYPE_CHECKING:
    from vllm_stack.pins import Pin
    from vllm_stack.workspace import Workspace


def base_of(workspace: Workspace, pin: Pin, *, offline: bool) -> Base:
    """Return the base of ``pin``; the sdist is fetched only when it was never imported."""
    found = Base.find(workspace, pin)
    if found is not None:
        return found
    sdist = Fetcher(workspace.downloads, offline=offline).fetch(pin.distribution, pin.sdist)
    return Base.ensure(workspace, pin, sdist)
