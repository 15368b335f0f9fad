# Sourced by the other scripts: makes .venv of this repository where it is missing, installs what '.[verify,dev]' needs
# into it, each file by its hash (scripts/supply.sh), and enters it. An environment that happens to be active is left
# alone: it may be a host's, with another torch. MIS_VENV names another environment, for example
# MIS_VENV="$VIRTUAL_ENV". A stamp skips the install until setup.py, pyproject.toml or the constraints change. PYTHON
# names the interpreter (default python3). With --help a script prints its first lines, and nothing is installed.

[[ " $* " != *" --help "* ]] || exec sed -n '2,/^set /s/^# \?//p' "$0"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=${MIS_VENV:-$repository/.venv}
[[ $environment = /* ]] || environment=$PWD/$environment

make_environment() {
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
        echo "$python is not Python 3.11 to 3.13; name one, for example PYTHON=python3.11 bash $0" >&2
        return 1
    }
    "$python" -m venv "$environment"
}

enter_environment() {
    if [ -n "${VIRTUAL_ENV:-}" ] && [ "$VIRTUAL_ENV" != "$environment" ]; then
        echo "leaving the active environment $VIRTUAL_ENV alone; using $environment (MIS_VENV names another)" >&2
    fi
    unset PYTHONHOME
    export VIRTUAL_ENV="$environment" PATH="$environment/bin:$PATH"
}

install_once() {
    local stamp="$environment/.mis-plugins-install" wanted
    wanted="$repository $(cat "$repository"/{setup.py,pyproject.toml,constraints.txt,constraints-hashed.txt} | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    echo "installing '.[verify,dev]' into $environment (once)" >&2
    (cd "$repository" && python -m pip install -qq --no-deps --require-hashes --requirement constraints-hashed.txt)
    # torch has no hash, since its build depends on the machine; what else it needs is there.
    (cd "$repository" && python -m pip install -qq --editable '.[verify,dev]' --constraint constraints.txt)
    echo "$wanted" >"$stamp"
}

[ -x "$environment/bin/python" ] || make_environment
enter_environment
install_once
