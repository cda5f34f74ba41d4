"""What the scheduler of an engine in this process put into its batches."""

from __future__ import annotations

from typing import Any


class BatchWatch:
    """The fullest batches since the watch was made, and how many requests were preempted.

    Attributes:
        requests: Most requests of one batch.
        decodes: Most requests of a batch without a prefill.
        windows: Most requests of such a batch that have a row for each of their drafts beside their own.
        prefills_in_flight: Most batches with a prefill that were on their way at the same time.
        preemptions: Requests that lost their place in the cache.

    """

    def __init__(self, engine: Any) -> None:
        self.requests = 0
        self.decodes = 0
        self.windows = 0
        self.prefills_in_flight = 0
        self.preemptions = 0
        self._core = engine.llm_engine.engine_core.engine_core
        scheduler = self._core.scheduler
        self._schedule, self._preempt = scheduler.schedule, scheduler._preempt_request
        self._longest_decode = 1 + scheduler.num_spec_tokens
        scheduler.schedule = self._watched_schedule
        scheduler._preempt_request = self._watched_preempt

    def _watched_schedule(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._schedule(*args, **kwargs)
        count = len(batch.num_scheduled_tokens)
        self.requests = max(self.requests, count)
        if not self._has_prefill(batch):
            self.decodes = max(self.decodes, count)
            rows = batch.num_scheduled_tokens.values()
            self.windows = max(self.windows, sum(tokens == self._longest_decode for tokens in rows))
        flying = [batch, *(entry[1] for entry in self._core.batch_queue or ())]
        self.prefills_in_flight = max(self.prefills_in_flight, sum(map(self._has_prefill, flying)))
        return batch

    def _has_prefill(self, batch: Any) -> bool:
        return any(tokens > self._longest_decode for tokens in batch.num_scheduled_tokens.values())

    def _watched_preempt(self, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        return self._preempt(*args, **kwargs)

    def as_json(self) -> dict[str, int]:
        """Return plain values."""
        names = ("requests", "decodes", "windows", "prefills_in_flight", "preemptions")
        return {name: getattr(self, name) for name in names}


class DraftWatch:
    """Counts the tokens that were drafted and those that were accepted.

    The engine's steps tell less: they are those of the request that accepts fewest.

    Attributes:
        drafted: Tokens that were drafted and verified.
        accepted: Tokens of these that the engine kept.

    """

    def __init__(self, engine: Any) -> None:
        self.clear()
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        self._make_stats = scheduler.make_spec_decoding_stats
        scheduler.make_spec_decoding_stats = self._watched_stats

    def clear(self) -> None:
        """Count from zero."""
        self.drafted = self.accepted = 0

    def _watched_stats(self, *args: Any, **kwargs: Any) -> Any:
        self.drafted += kwargs["num_draft_tokens"]
        self.accepted += kwargs["num_accepted_tokens"]
        return self._make_stats(*args, **kwargs)

    def as_json(self) -> dict[str, int]:
        """Return the counts."""
        return {"drafted": self.drafted, "accepted": self.accepted}
