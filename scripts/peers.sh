#!/usr/bin/env bash
# Calls other packages' corrections and compares them with ours. Arguments go to pytest.
#   bash scripts/peers.sh -k verl
# Their requirements contradict each other and ours, so no extra can name them: .venv-peers (or PEERS_VENV) holds
# what peers.txt pins, without dependencies, and sees everything else, torch included, in the environment of test.sh.
# Its folder `earlier` holds what peers-earlier.txt pins: older releases, which tests/support/peers/loading.py alone enters.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

peers=${PEERS_VENV:-$repository/.venv-peers}
stamp="$peers/.mis-plugins-peers" # conftest.py collects test_peers.py where it stands
wanted="$VIRTUAL_ENV $(cat peers.txt peers-earlier.txt constraints.txt | cksum)"

# Wheels of Python 3.11 for any platform: none holds compiled code, but one is tagged so and two refuse 3.13.
install_wheels() {
    python -m pip install -qq --no-deps --requirement "$1" --target "$2" \
        --python-version 3.11 --platform manylinux1_x86_64 --only-binary :all:
}
site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing peers.txt into $peers (once)" >&2
    python -m venv --clear --without-pip "$peers"
    install_wheels peers.txt "$(site_packages "$peers")"
    install_wheels peers-earlier.txt "$peers/earlier"
    echo "import site; site.addsitedir('$(site_packages "$VIRTUAL_ENV")')" >"$(site_packages "$peers")/ordinary.pth"
    echo "$wanted" >"$stamp"
fi
exec "$peers/bin/python" -m pytest tests/peers/test_peers.py tests/peers/test_peer_differences.py -p no:cacheprovider -r s "$@"
