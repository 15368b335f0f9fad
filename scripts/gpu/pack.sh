#!/usr/bin/env bash
# Packs a real SGLang for an offline machine with a Hopper GPU. A transfer of 64 MiB takes a part beside the checkout:
#   bash scripts/gpu/pack.sh PARTS
# Fetches the wheels of engine.txt (480 MB) with `python3 -m pip`, for Python 3.12 whatever runs here, and writes
# PARTS/part.1, PARTS/part.2 and so on, which scripts/gpu/run.sh unpacks where it finds them. xz takes some minutes.
set -euo pipefail
if [ $# -ne 1 ]; then
    echo "usage: pack.sh PARTS" >&2
    exit 2
fi
parts=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -e "$parts" ]; then
    echo "pack.sh: $parts is there already; name a new folder" >&2
    exit 2
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

there=(--only-binary=:all: --python-version 3.12 --implementation cp)
for glibc in 34 28 27 24 17 12 5; do there+=(--platform "manylinux_2_${glibc}_x86_64"); done
there+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
echo "fetching the wheels of engine.txt" >&2
python3 -m pip download -q --no-deps "${there[@]}" -r "$here/engine.txt" -d "$scratch/wheels"
python3 -m pip install -q --no-index --no-deps --no-compile "${there[@]}" --target "$scratch/site" "$scratch"/wheels/*.whl
# Kernels for other GPUs and other models, a tenth of the size.
rm -r "$scratch"/site/sgl_kernel/{sm100,flashmla_ops.*,infllm_ops.*}
echo "packing $(du -sh "$scratch/site" | cut -f1)" >&2
mkdir -p "$parts"
tar -C "$scratch/site" -c . | xz -T0 -3 | split --bytes=46M --numeric-suffixes=1 --suffix-length=1 - "$parts/part."
ls -sh "$parts" >&2
