#!/usr/bin/env bash
# prepare.sh PIECE WHEELS: on the GPU host, add the last piece of the bundle, unpack all of them to /tmp/site, and
# install there the wheels that the bundle lacks (torchvision, which GLM-5.3-Flash's model file imports).
set -euo pipefail
mkdir -p /tmp/pieces /tmp/site
cp "$1"/site.txz.* /tmp/pieces/
cat /tmp/pieces/site.txz.* | xz -dc -T0 | tar -x -C /tmp/site
rm -r /tmp/pieces
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site "$2"/*.whl
du -sh /tmp/site
