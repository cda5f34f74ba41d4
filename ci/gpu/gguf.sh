#!/usr/bin/env bash
# gguf.sh FOLDER OUT SECONDS [options of gguf_proof.py]: run the GGUF proof on a host where prepare.sh made /tmp/site.
#
# FOLDER holds what was carried: whl/ (the patched plugin's wheel, and what the site lacks of gguf and pycountry),
# files.zip (wheel_files.py pack), tests/ (those of the patched plugin), csrc/ (of the plugin's sdist) and
# kernels/_C_gguf.abi3.so (gguf_kernels.sh). The wheel's own compiled kernels are used if they load, else the
# carried ones, else they are compiled here; without any the proof says so and judges the Triton kernels.
here=$(cd "$(dirname "$0")" && pwd) folder=$(cd "$1" && pwd) out=$2 seconds=$3
shift 3
site=${SITE:-/tmp/site} work=${WORK:-/tmp/gguf}
export PYTHONUNBUFFERED=1 PYTHONPATH=$site:$site/nvidia_cutlass_dsl/dsl_packages
module=$site/vllm_gguf_plugin/_C_gguf.abi3.so
plugin=("$folder"/whl/vllm_gguf_plugin-*.whl)
started=$SECONDS

# Of two, one would be installed and the other one's stack be reported.
if [ "${#plugin[@]}" != 1 ] || [ ! -f "${plugin[0]}" ]; then
    echo "gguf.sh: $folder/whl has to hold one wheel of the plugin, not: ${plugin[*]##*/}"
    exit 2
fi

loads() {
    python3 - "$1" <<'P'
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("_C_gguf", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
blocks = torch.zeros(4, 34, dtype=torch.uint8, device="cuda")
assert torch.ops._C_gguf.ggml_dequantize(blocks, 8, 4, 32, torch.float32).abs().sum().item() == 0
print("the kernels of", sys.argv[1], "load with PyTorch", torch.__version__)
P
}

for wheel in "$folder"/whl/*.whl; do python3 -m zipfile -e "$wheel" "$site" || exit 3; done
python3 -c 'import gguf' || exit 3
python3 "$here/wheel_files.py" install --files "$folder/files.zip" --site "$site" --out /tmp/installed.json || exit 4
if ! loads "$module" 2>"$out/kernels.txt"; then
    tail -1 "$out/kernels.txt"
    cp "$folder/kernels/_C_gguf.abi3.so" /tmp/_C_gguf.abi3.so
    if ! loads /tmp/_C_gguf.abi3.so 2>>"$out/kernels.txt"; then
        tail -1 "$out/kernels.txt"
        bash "$here/gguf_kernels.sh" "$folder/csrc" /tmp/_C_gguf.abi3.so 2>>"$out/kernels.txt"
        loads /tmp/_C_gguf.abi3.so 2>>"$out/kernels.txt" || tail -1 "$out/kernels.txt"
    fi
    cp /tmp/_C_gguf.abi3.so "$module"
fi
left=$((seconds - SECONDS + started))
rm -rf "$work"
timeout $((left + 15)) python3 "$here/gguf_proof.py" --plugin-tests "$folder/tests" --work "$work" \
    --out "$out/gguf.json" --files /tmp/installed.json --plugin "${plugin[0]}" \
    --seconds "$left" "$@" 2>&1 | tee "$out/gguf.txt"
status=${PIPESTATUS[0]}
cd "$work" && tar czf "$out/gguf-logs.tar.gz" ./*.log $(ls ./*.npz ./*.result.json ./products.json 2>/dev/null)
for log in *.log; do
    [ "$log" = products.log ] || [ -e "${log%.log}.result.json" ] && continue
    echo "=== $log"
    grep -nE 'Error|error:' "$log" | tail -4 | cut -c1-300
done
echo "gguf.sh: status $status after $((SECONDS - started)) s"
exit "$status"
