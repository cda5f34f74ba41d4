"""Check Triton kernels of the patched vLLM on a machine that has no GPU.

Three tools, each for a process of its own:

* :mod:`kernelcheck.interpreter` makes Triton's interpreter value-correct for bfloat16 and fp8, so
  that a kernel's numbers can be compared with a float64 reference;
* :mod:`kernelcheck.aot` compiles what a launcher really launches for chips that are not there, and
  measures shared memory, registers and spills;
* :mod:`kernelcheck.platform` makes vLLM believe that a given chip is present.

Triton decides at import whether it interprets or compiles, hence the separate processes.
"""
