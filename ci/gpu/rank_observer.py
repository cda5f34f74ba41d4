"""Observe an engine whose ranks are processes of their own.

vLLM imports `RankObserver` in the process of every rank before it starts anything there, and adds its
methods to the worker (`worker_extension_cls`). `EveryRank` calls them, and stands in for an `Observer`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dcp_merge
from engine_worker import JOB_FILE, forbid_autotuning, observe_backend, read_task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launches import Observer

# vLLM's binding refuses an NCCL without these and then does without NCCL, silently: reductions over the ranks
# would be left undone. They are for sleep mode and came with 2.29; the host's torch 2.11 brings 2.28.9.
SLEEP_FUNCTIONS = ("ncclCommSuspend", "ncclCommResume")
LAST_RANK = "rank_zero"  # damage: the output of the last rank alone is zeroed


def allow_older_nccl() -> None:
    """Let vLLM's binding do without the functions for sleep mode where NCCL lacks them."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import find_nccl_library

    library = ctypes.CDLL(find_nccl_library())  # torch has loaded it
    missing = {name for name in SLEEP_FUNCTIONS if not hasattr(library, name)}
    NCCLLibrary.exported_functions = [
        function for function in NCCLLibrary.exported_functions if function.name not in missing
    ]


def nccl_reduces() -> bool:
    """Return whether NCCL reduces over the tensor parallel ranks; vLLM goes on without it, silently."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    nccl = group.device_communicator.pynccl_comm if group.world_size > 1 else None
    return nccl is not None and not nccl.disabled


def install() -> Observer | None:
    """Observe the backend in the process of a rank; None in any other process."""
    if multiprocessing.parent_process() is None or JOB_FILE not in os.environ:
        return None
    job = read_task(Path(os.environ[JOB_FILE])).job
    forbid_autotuning()
    allow_older_nccl()
    dcp_merge.do_without()
    observer: Observer = observe_backend(job)
    return observer


OBSERVER = install()


def this_rank() -> Observer:
    """Return the observer of the rank whose process this is."""
    if OBSERVER is None:
        raise RuntimeError("nothing is observed here: this is not the process of a rank")
    return OBSERVER


class RankObserver:
    """Methods of each rank's worker."""

    rank: int
    parallel_config: Any

    def observer_start(self) -> None:
        """Forget what ran so far."""
        this_rank().start()

    def observer_snapshot(self) -> dict[str, Any]:
        """Return the counts so far."""
        return this_rank().snapshot()

    def observer_damage(self, damage: Any) -> None:
        """Damage what this rank computes."""
        if damage == LAST_RANK:
            damage = "zero" if self.rank == self.parallel_config.world_size - 1 else "none"
        this_rank().damage = damage

    def observer_variants(self) -> tuple[list[str], list[str]]:
        """Return the variants launched, and those of them that nothing announced."""
        return this_rank().variant_names()

    def observer_cache(self) -> dict[str, Any]:
        """Return what is known of the cache, and whether NCCL reduces over the ranks."""
        return this_rank().cache | {"nccl": nccl_reduces()}


class EveryRank:
    """The observers of all ranks of an engine."""

    def __init__(self) -> None:
        self._engine: Any = None

    def attach(self, engine: Any) -> None:
        """Talk to the ranks of this engine from now on."""
        self._engine = engine

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._engine.collective_rpc(f"observer_{method}", args=arguments)
        return answers

    def start(self) -> None:
        """Forget what ran so far."""
        self._ask("start")

    def snapshot(self) -> dict[str, Any]:
        """Return the counts of the first rank, and beside them those of the others."""
        return first_of(self._ask("snapshot"))

    @property
    def damage(self) -> str:
        """Never read; set it to damage attention on all ranks, or on the last."""
        raise NotImplementedError

    @damage.setter
    def damage(self, damage: str) -> None:
        self._ask("damage", damage)

    def variant_names(self) -> tuple[list[str], list[str]]:
        """Return the variants that any rank launched, and those of them that it did not announce."""
        answers = self._ask("variants")
        launched, unannounced = (sorted({name for answer in answers for name in answer[i]}) for i in (0, 1))
        return launched, unannounced

    @property
    def cache(self) -> dict[str, Any]:
        """What the first rank knows of the cache, and beside it what the others do."""
        return first_of(self._ask("cache"))


def first_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first rank's answer with those of the others in it."""
    first, *others = answers
    return {**first, "other_ranks": list(others)}
