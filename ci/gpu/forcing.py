"""Logits processor that prescribes the generated tokens on the first model runner.

The second runner has trace replay for that. Raw log-probabilities are taken before processors run.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "forced_token_ids"


class _Force:
    """Processor of one request."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Leave only the token that is due."""
        only = torch.full_like(logits, float("-inf"))
        only[self.tokens[len(output_ids)]] = 0.0
        return only


class Forcing(AdapterLogitsProcessor):
    """Serves requests whose `extra_args` hold the tokens."""

    def is_argmax_invariant(self) -> bool:
        """Say that greedy sampling is changed."""
        return False

    def new_req_logits_processor(self, params: Any) -> _Force | None:
        """Return the processor of a request."""
        tokens = (params.extra_args or {}).get(FORCED)
        return None if tokens is None else _Force(tokens)
