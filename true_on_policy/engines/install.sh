#!/usr/bin/env bash
# Makes a rollout engine's own environment, on CPU. Nothing of it enters the environment of mis-plugins.
#   bash true_on_policy/engines/install.sh sglang [FOLDER]      default FOLDER: .venv-sglang beside the package
#   bash true_on_policy/engines/install.sh vllm [FOLDER]        default FOLDER: .venv-vllm
# About five minutes and 3.4 GB (with torch's CPU build; let pip's configuration find one). A second call does nothing.
# PYTHON names the interpreter (default python3), 3.11 to 3.13. Ends with the path of the environment's python.
set -euo pipefail

needed_gb=10
torch=torch==2.13.0 # what constraints.txt pins: both sides take silu, cos, exp and log_softmax from torch
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)

engine=${1:-}
if [ ! -f "$here/$engine.txt" ]; then
    echo "usage: bash $0 sglang|vllm [FOLDER]    got '$engine'" >&2
    exit 2
fi
folder=${2:-$repository/.venv-$engine}
python="$folder/bin/python"
stamp="$folder/.mis-plugins-engine"
wanted="$repository $(cat "$here/install.sh" "$here/$engine.txt" "$repository/setup.py" | cksum)"

site_packages() { "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

check_python() {
    "${PYTHON:-python3}" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
        echo "${PYTHON:-python3} is not Python 3.11 to 3.13; name one, for example PYTHON=python3.11 bash $0 $engine" >&2
        exit 2
    }
}

check_disk() {
    local parent=$folder free_gb
    until [ -d "$parent" ]; do parent=$(dirname "$parent"); done
    free_gb=$(($(df --output=avail -k "$parent" | tail -1) / 1024 / 1024))
    if [ "$free_gb" -lt "$needed_gb" ]; then
        echo "$folder: $free_gb GB free, $needed_gb GB needed; free some, or name another folder" >&2
        exit 2
    fi
}

# The index's torchvision is built for CUDA. Beside a CPU torch its operators do not load, and its import fails where it
# describes one of them. SGLang imports it and calls none, so it is enough that the names exist.
mend_torchvision() {
    if ! grep -q ^torchvision= "$here/$engine.txt" || "$python" -c 'import torchvision' 2>/dev/null; then return; fi
    cat >"$(site_packages)/torchvision/_declared.py" <<'DECLARED'
"""Written by mis-plugins: declares the two operators that torchvision describes when its own library did not load."""
import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
DECLARED
    sed -i 's/^import torch$/import torch\nimport torchvision._declared/' "$(site_packages)/torchvision/_meta_registrations.py"
    "$python" -c 'import torchvision'
}

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    check_python
    [ -d "$folder" ] || check_disk
    echo "installing $engine into $folder (once)" >&2
    "${PYTHON:-python3}" -m venv "$folder"
    "$python" -m pip install -qq "$torch"
    "$python" -m pip install -qq --no-deps --requirement "$here/$engine.txt"
    mend_torchvision
    "$python" -m pip install -qq --no-deps --editable "$repository" # our plugin, by its entry point
    echo "$wanted" >"$stamp"
fi
echo "$python"
