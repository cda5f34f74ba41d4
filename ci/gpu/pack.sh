#!/usr/bin/env bash
# pack.sh: here, make all that calls on a GPU host carry, and say which calls unpack it there.
#
# .gpu-bundle: the official wheel and what it requires, as pieces; made once for each pin and kept.
# .gpuwork: what the stack changes (files.zip), and the wheel of torchvision that fits the host's torch.
# Reports name the commit that files.zip is of, so that tracked files with changes are refused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
torchvision=torchvision==0.26.0 # for torch 2.11
bundle=.gpu-bundle work=.gpuwork

if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo "pack.sh: commit your changes first: the reports would name a commit without them" >&2
    exit 9
fi
mkdir -p "$bundle" "$work/whl"
tools/vllm-stack build-wheel --target vllm --arch x86_64 --json "$bundle/built.json"
tools/vllm-stack fetch --target vllm --arch x86_64 --offline --json "$bundle/fetched.json"
python=.venv/bin/python
mapfile -t wheels < <("$python" - "$bundle" <<'P'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
built = json.loads((folder / "built.json").read_text())
print(pathlib.Path(built["folder"], built["wheels"][0]["output"]["filename"]))
fetched = json.loads((folder / "fetched.json").read_text())
print(next(file["path"] for file in fetched["files"] if file["path"].endswith(".whl")))
P
)
[ "${#wheels[@]}" = 2 ]
stamp=$(cat "${wheels[1]}" ci/gpu/make_bundle.py ci/gpu/host-packages.txt | git hash-object --stdin)
if [ "$(cat "$bundle/stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -f "$bundle/stamp"
    "$python" ci/gpu/make_bundle.py --out "$bundle" --wheel "${wheels[1]}"
    printf '%s' "$stamp" >"$bundle/stamp"
fi
"$python" -m pip --disable-pip-version-check --quiet download --no-deps --only-binary :all: --python-version 312 \
    --implementation cp --abi cp312 --platform manylinux_2_28_x86_64 -d "$work/whl" "$torchvision"
"$python" ci/gpu/wheel_files.py pack --wheel "${wheels[0]}" --base "${wheels[1]}" \
    --commit "$(git rev-parse HEAD)" --out "$work/files.zip"

pieces=("$bundle"/piece*)
echo "Calls that unpack it on the host, each with what it carries:"
for piece in "${pieces[@]::${#pieces[@]}-1}"; do
    echo "  $piece: bash ci/gpu/unpack.sh $piece"
done
echo "  ${pieces[-1]} $work: bash ci/gpu/prepare.sh ${pieces[-1]} $work/whl"
echo "Then: $work: bash ci/gpu/go.sh --steps …"
