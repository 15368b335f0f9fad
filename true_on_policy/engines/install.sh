#!/usr/bin/env bash
# Makes rollout engines' own environments, on CPU. Nothing of them enters the environment of mis-plugins.
#   bash true_on_policy/engines/install.sh sglang             into .venv-sglang beside the package, or SGLANG_VENV
#   bash true_on_policy/engines/install.sh sglang vllm        the other into .venv-vllm, or VLLM_VENV
# Some minutes and 3.4 GB each (with torch's CPU build; let pip's configuration find one). A second call does
# nothing. PYTHON names the interpreter (default python3), 3.11 to 3.13. Ends with the paths of the environments' pythons.
set -euo pipefail

needed_gb=10 # of both engines and what pip keeps meanwhile
torch=torch==2.13.0 # what constraints.txt pins: both sides take silu, cos, exp and log_softmax from torch
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)

check_names() { # an engine with an environment of its own has a folder here with a packages.txt
    local name offered
    offered=$(cd "$here" && printf '%s|' */packages.txt)
    for name in "${@:-}"; do
        if [ ! -f "$here/$name/packages.txt" ]; then
            offered=${offered//\/packages.txt/}
            echo "usage: bash $0 ${offered%|} ...    got '$name'" >&2
            exit 2
        fi
    done
}

folder() {
    local variable=${1^^}_VENV
    echo "${!variable:-$repository/.venv-$1}"
}

wanted() { echo "$repository $(cat "$here/install.sh" "$here/$1/packages.txt" "$repository/setup.py" | cksum)"; }
stamp() { echo "$(folder "$1")/.mis-plugins-engine"; }
installed() { [ "$(cat "$(stamp "$1")" 2>/dev/null)" = "$(wanted "$1")" ]; }

check_python() {
    "${PYTHON:-python3}" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
        echo "${PYTHON:-python3} is not Python 3.11 to 3.13; name one, for example PYTHON=python3.11 bash $0" >&2
        exit 2
    }
}

check_disk() {
    local parent free_gb
    parent=$(folder "$1")
    if [ -d "$parent" ]; then return; fi # made before: little is added
    until [ -d "$parent" ]; do parent=$(dirname "$parent"); done
    free_gb=$(($(df --output=avail -k "$parent" | tail -1) / 1024 / 1024))
    if [ "$free_gb" -lt "$needed_gb" ]; then
        echo "$(folder "$1"): $free_gb GB free, $needed_gb GB needed; free some, or let ${1^^}_VENV name another folder" >&2
        exit 2
    fi
}

# The index's torchvision is built for CUDA. Beside a CPU torch its operators do not load, and its import fails where it
# describes one of them. SGLang imports it and calls none, so it is enough that the names exist.
mend_torchvision() {
    local python=$1 packages
    if "$python" -c 'import torchvision' 2>/dev/null; then return; fi
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cat >"$packages/torchvision/_declared.py" <<'DECLARED'
"""Written by mis-plugins: declares the two operators that torchvision describes when its own library did not load."""
import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
DECLARED
    sed -i 's/^import torch$/import torch\nimport torchvision._declared/' "$packages/torchvision/_meta_registrations.py"
    "$python" -c 'import torchvision'
}

install() {
    local engine=$1 python
    python="$(folder "$engine")/bin/python"
    echo "installing $engine into $(folder "$engine") (once)" >&2
    "${PYTHON:-python3}" -m venv "$(folder "$engine")"
    "$python" -m pip install -qq "$torch"
    "$python" -m pip install -qq --no-deps --requirement "$here/$engine/packages.txt"
    if grep -q ^torchvision= "$here/$engine/packages.txt"; then mend_torchvision "$python"; fi
    "$python" -m pip install -qq --no-deps --editable "$repository" # our plugin, by its entry point
    wanted "$engine" >"$(stamp "$engine")"
}

check_names "$@"
missing=()
for engine in "$@"; do
    if ! installed "$engine"; then missing+=("$engine"); fi
done
for engine in "${missing[@]}"; do
    check_python
    check_disk "$engine"
done
installers=() # one beside the other: pip uses one core
for engine in "${missing[@]}"; do
    install "$engine" &
    installers+=($!)
done
failed=
for installer in "${installers[@]}"; do wait "$installer" || failed=yes; done
if [ -n "$failed" ]; then exit 1; fi
for engine in "$@"; do echo "$(folder "$engine")/bin/python"; done
