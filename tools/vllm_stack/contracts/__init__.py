"""Contracts: what a patch relies on in upstream, checked on syntax trees alone; nothing is imported."""

from vllm_stack.contracts.broken import BrokenContract, ContractFinding, explain_contracts, name_missing
from vllm_stack.contracts.check import ListedContract, broken_contracts, check_contracts, list_contracts
from vllm_stack.contracts.kinds import Contract

__all__ = [
    "BrokenContract",
    "Contract",
    "ContractFinding",
    "ListedContract",
    "broken_contracts",
    "check_contracts",
    "explain_contracts",
    "list_contracts",
    "name_missing",
]
