#!/usr/bin/env bash
# gguf_kernels.sh CSRC OUT: compile the plugin's kernels for SM90 and PyTorch 2.11, in half a minute.
#
# The module in the plugin's wheel needs symbols that PyTorch 2.13 brought, and a GPU host may have an older one.
# CSRC is the folder vllm_gguf_plugin/csrc of the plugin's sdist. Headers of any PyTorch from 2.11 do, from a CPU
# build too: the macro keeps the module to what 2.11 has. No GPU is needed.
set -euo pipefail
source_folder=$(cd "$1" && pwd) out=$2
python=${PYTHON:-python3}
torch=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${NVCC:-nvcc}" -O3 -std=c++17 --use_fast_math -gencode arch=compute_90,code=sm_90 -Xcompiler -fPIC \
    -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020b000000000000 -DPy_LIMITED_API=0x030a0000 \
    "-I$source_folder" "-I$source_folder/gguf" "-I$torch/include" "-I$headers" \
    --cudart shared -shared "-L$torch/lib" -Xlinker --no-as-needed -ltorch \
    "$source_folder/gguf/gguf_kernel.cu" "$source_folder/torch_bindings.cpp" -o "$work/module.so"
mv "$work/module.so" "$out"
