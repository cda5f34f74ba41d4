"""Pytest plugin for upstream's own tests on a machine without a GPU.

Loaded with ``-p pretend_plugin`` it makes a chip seem present before anything of vLLM is imported
(``KERNELCHECK_CHIP`` names its capability, 120 by default). Upstream's fixtures empty the device's
cache after each test; with no device there is none to empty.
"""

from __future__ import annotations

import os

import torch

from kernelcheck.chips import chip
from kernelcheck.platform import pretend

pretend(chip(int(os.environ.get("KERNELCHECK_CHIP", "120"))))


def _nothing_to_empty() -> None:
    """Stand in for ``torch.accelerator.empty_cache``, which raises without a device."""


torch.accelerator.empty_cache = _nothing_to_empty
torch.accelerator.empty_host_cache = _nothing_to_empty
