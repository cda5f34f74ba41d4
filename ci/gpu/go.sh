#!/usr/bin/env bash
# go.sh [options of run.py]: on a GPU host, where prepare.sh made /tmp/site, run steps on what pack.sh packed.
#
# OUT is the folder for the reports.
# Refuses files of another stack than this tree's, which ci/matrix.json names: .gpuwork may be an older one.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$here/../../.gpuwork
python3 - "$work/files.zip" "$here/../matrix.json" <<'P'
import json, sys, zipfile
packed = json.loads(zipfile.ZipFile(sys.argv[1]).read("manifest.json"))["stack_id"]
targets = json.load(open(sys.argv[2]))["targets"]
own = next(target["stack_id"] for target in targets if target["target"] == "vllm")
if packed != own:
    sys.exit(f"go.sh: .gpuwork/files.zip is of the stack {packed[:8]}, this tree's is {own[:8]}: run ci/gpu/pack.sh")
P
exec python3 "$here/run.py" --files "$work/files.zip" --site /tmp/site --out "$OUT" "$@"
