"""Contracts: what a patch relies on in upstream, checked on syntax trees alone; nothing is imported."""

from vllm_stack.contracts.check import (
    ContractFinding,
    ListedContract,
    check_contracts,
    list_contracts,
)
from vllm_stack.contracts.kinds import Contract

__all__ = ["Contract", "ContractFinding", "ListedContract", "check_contracts", "list_contracts"]
