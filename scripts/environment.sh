# Sourced by the other scripts: enters the active virtual environment, or else .venv (made if missing), and installs
# '.[local,dev]' with constraints.txt into it. A stamp skips the install until setup.py, pyproject.toml or
# constraints.txt change. PYTHON names the interpreter that makes .venv (default python3).

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

make_environment() {
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
        echo "$python is not Python 3.11 to 3.13; name one, for example PYTHON=python3.11 bash $0" >&2
        return 1
    }
    "$python" -m venv "$repository/.venv"
}

install_once() {
    local stamp="$VIRTUAL_ENV/.mis-plugins-install" wanted
    wanted="$repository $(cat "$repository"/{setup.py,pyproject.toml,constraints.txt} | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    echo "installing '.[local,dev]' into $VIRTUAL_ENV (once)" >&2
    (cd "$repository" && python -m pip install -qq --editable '.[local,dev]' --constraint constraints.txt)
    echo "$wanted" >"$stamp"
}

if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -x "$repository/.venv/bin/python" ] || make_environment
    # shellcheck disable=SC1091
    source "$repository/.venv/bin/activate"
fi
install_once
