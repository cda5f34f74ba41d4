#!/usr/bin/env bash
# without_toolkit.sh DIR COMMAND...: run a command where no CUDA compiler can be found, with empty caches in DIR.
#
# In a mount namespace of its own the programs of every CUDA toolkit and every ninja are covered by empty folders and
# files that cannot be run; PATH, CUDA_HOME and CUDA_PATH lead to none. Driver, libraries and C compiler stay. What the
# command and its children try to run of them is written to DIR/trapped (exec_trap.c).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ "$1" != --inside ]; then exec unshare --mount --propagation private "$0" --inside "$@"; fi
folder=$2
shift 2

rm -rf "$folder"
mkdir -p "$folder"/{empty,cache}
: >"$folder/trapped"
: >"$folder/nothing"
cc -shared -fPIC -O1 -Wall -Werror -o "$folder/exec_trap.so" "$here/exec_trap.c" -ldl

shopt -s nullglob
for bin in /usr/local/cuda*/bin /usr/local/cuda*/nvvm /opt/cuda*/bin; do
    mount --bind "$folder/empty" "$bin"
done
# Others: of packages, in virtual environments, from the distribution. find fails at what it may not read.
{
    find / -xdev \( -path /proc -o -path /sys -o -path "$folder" \) -prune -o \
        \( -name nvcc -o -name cicc -o -name ninja \) \( -type f -o -type l \) -print 2>/dev/null || true
} | while read -r program; do
    if [ -f "$program" ]; then mount --bind "$folder/nothing" "$(readlink -f "$program")"; fi
done
if [ -n "$(type -aP nvcc cicc ninja || true)" ]; then
    echo "still there: $(type -aP nvcc cicc ninja)" >&2
    exit 1
fi

unset CUDA_HOME CUDA_PATH DG_JIT_NVCC_COMPILER DG_JIT_CACHE_DIR
export HOME=$folder XDG_CACHE_HOME=$folder/cache TRITON_CACHE_DIR=$folder/cache/triton
export VLLM_CACHE_ROOT=$folder/cache/vllm TORCHINDUCTOR_CACHE_DIR=$folder/cache/inductor
export EXEC_TRAP_LOG=$folder/trapped LD_PRELOAD=$folder/exec_trap.so
exec "$@"
