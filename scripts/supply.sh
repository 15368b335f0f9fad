#!/usr/bin/env bash
# What this project installs, by the hash of each file. Tools are installed into a folder that is removed again.
#   bash scripts/supply.sh lock          writes constraints-hashed.txt: constraints.txt without torch, each file by SHA-256
#   bash scripts/supply.sh sbom FILE     writes these packages as CycloneDX, with equal bytes each time
#   bash scripts/supply.sh audit         asks for advisories on them (pip-audit); 1: there are some; 2: nobody answered
# torch has no hash: which build of it is installed depends on the machine.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
hashed=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/constraints-hashed.txt

tool() { # a package and the program in it
    python3 -m venv "$scratch/tools"
    "$scratch/tools/bin/python" -m pip install -qq "$1"
    shift
    "$scratch/tools/bin/$@"
}

case "${1:-} $#" in
"lock 1")
    grep -E '^[a-zA-Z]' "${hashed%-hashed.txt}.txt" | grep -v '^torch==' >"$scratch/constraints.in"
    tool uv uv pip compile --quiet --no-header --no-annotate --no-deps --universal --python-version 3.11 \
        --generate-hashes "$scratch/constraints.in" -o "$scratch/hashed.txt"
    header="# Made of constraints.txt by scripts/supply.sh: its packages but torch, by the SHA-256 of their files."
    { echo "$header" && cat "$scratch/hashed.txt"; } >"$hashed"
    ;;
"sbom 2") tool cyclonedx-bom cyclonedx-py requirements --output-reproducible -o "$2" "$hashed" ;;
"audit 1")
    if tool pip-audit pip-audit --strict --disable-pip --requirement "$hashed" --format json -o "$scratch/found.json"; then exit 0; fi
    [ -s "$scratch/found.json" ] || exit 2
    cat "$scratch/found.json"
    exit 1
    ;;
*)
    sed -n '3,5s/^#   //p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
