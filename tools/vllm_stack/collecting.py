"""Python's collector of garbage in cycles, which looks again and again at what only grows."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the collector off: for work that makes many objects that stay, and hardly any cycles.

    What is there in the end is not looked at later either; it goes when nothing refers to it any more.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()
