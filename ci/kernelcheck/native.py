"""Stand-ins for the CUDA libraries that vLLM's native modules ask the loader for.

The official wheel's modules need ``libcuda.so.1`` and, with a CPU build of torch, also the CUDA
runtime, ``libtorch_cuda.so`` and their like. :func:`load_stubs` compiles one small library per
missing name and loads it before the modules are. Every function in them fails with "no device",
except the query of device attributes, which answers what :func:`set_attribute` was told.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIBRARIES: Final = {
    "libcuda.so.1": re.compile(r"cu[A-Z]\w*"),
    "libcudart.so.13": re.compile(r"(__)?cuda[A-Z]\w*"),
    "libnvrtc.so.13": re.compile(r"nvrtc[A-Z]\w*"),
    "libc10_cuda.so": re.compile(r"_ZN\w*c104cuda\w*"),
    "libtorch_cuda.so": re.compile(
        r"aoti_torch_get_current_cuda\w*|torch_(c10|get_current)_?cuda\w*|cublas[A-Z]\w*"
    ),
}
"""Libraries that a machine without a GPU lacks, with the symbols that each of them holds.

cuBLAS has no entry of its own because the modules reach it through ``libtorch_cuda.so``.
"""

MAX_SHARED_MEMORY_OPTIN: Final = 97
"""``cudaDevAttrMaxSharedMemoryPerBlockOptin`` of the CUDA runtime API, in bytes."""

# 100 is CUDA_ERROR_NO_DEVICE and cudaErrorNoDevice; for cuBLAS and torch any non-zero is a failure.
_FUNCTION: Final = "int {name}(void) {{ return 100; }}\n"
_TEXT_FUNCTION: Final = 'const char *{name}(void) {{ return "no CUDA device (kernelcheck stub)"; }}\n'
_ATTRIBUTES: Final = """
int kernelcheck_attributes[512];
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute < 0 || attribute >= 512 || kernelcheck_attributes[attribute] == 0) return 100;
    *value = kernelcheck_attributes[attribute];
    return 0;
}
"""


def native_modules(package: Path) -> list[Path]:
    """Return every native module below ``package``, in a fixed order."""
    return sorted(package.rglob("*.so"))


def undefined_symbols(modules: Iterable[Path]) -> set[str]:
    """Return the names that ``modules`` expect other libraries to define, without versions.

    Raises:
        subprocess.CalledProcessError: ``nm`` of binutils cannot read a module.
    """
    command = ["nm", "-D", "--undefined-only", "--format=posix", *map(str, modules)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    fields = (line.split() for line in listing.splitlines())
    return {words[0].partition("@")[0] for words in fields if len(words) > 1 and words[1] == "U"}


def stub_source(soname: str, symbols: Iterable[str]) -> str:
    """Return C source that defines those of ``symbols`` that belong to ``soname``."""
    wanted = _LIBRARIES[soname]
    names = sorted(name for name in symbols if wanted.fullmatch(name))
    special = _ATTRIBUTES if soname == "libcudart.so.13" else ""
    functions = (
        (_TEXT_FUNCTION if re.search(r"(String|Name)$", name) else _FUNCTION).format(name=name)
        for name in names
        if f"{name}(" not in special
    )
    return special + "".join(functions)


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _build(soname: str, source: str, folder: Path) -> Path:
    """Compile ``source`` to a library called ``soname``; reuse one with the same source."""
    target = folder / hashlib.sha256(source.encode()).hexdigest()[:16] / soname
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        code, versions = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        built = Path(scratch, soname)
        code.write_text(source)
        # The CUDA runtime's symbols are versioned with its name; glibc aborts when they are not.
        versions.write_text(f"{soname} {{ global: *; }};\n")
        linker = f"-Wl,-soname,{soname},--version-script,{versions}"
        command = ["cc", "-shared", "-fPIC", "-w", linker, str(code), "-o", str(built)]
        subprocess.run(command, check=True)
        built.replace(target)
    return target


def load_stubs(package: Path, cache: Path) -> list[str]:
    """Load a stand-in for each CUDA library that the modules of ``package`` need and lack.

    Torch has to be imported before: what a CUDA build of torch has loaded is left alone.

    Args:
        package: The installed ``vllm`` folder.
        cache: Folder for the compiled stubs, created if need be.

    Returns:
        The names of the libraries now stubbed.

    Raises:
        subprocess.CalledProcessError: ``nm`` or ``cc`` fails.
    """
    missing = [soname for soname in _LIBRARIES if not _is_loaded(soname)]
    symbols = undefined_symbols(native_modules(package)) if missing else set()
    cache.mkdir(parents=True, exist_ok=True)
    for soname in missing:
        library = _build(soname, stub_source(soname, symbols), cache)
        ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    return missing


def set_attribute(attribute: int, value: int) -> None:
    """Let the stubbed runtime answer ``value`` when asked for a device ``attribute``.

    Raises:
        OSError: The CUDA runtime is not loaded.
        ValueError: It is the real one (a CUDA build of torch), which cannot be told.
    """
    runtime = ctypes.CDLL("libcudart.so.13", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    (ctypes.c_int * 512).in_dll(runtime, "kernelcheck_attributes")[attribute] = value
