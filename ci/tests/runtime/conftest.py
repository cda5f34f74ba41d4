"""Make this process interpret Triton kernels, with correct bfloat16, before anything loads Triton.

Tests that compile start processes of their own (:mod:`kernelcheck.processes`).
"""

from __future__ import annotations

import os
import sys

if "triton" in sys.modules:
    raise RuntimeError("Triton was loaded before TRITON_INTERPRET could be set")
os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

from kernelcheck import interpreter

interpreter.install()
