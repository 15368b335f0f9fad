#!/usr/bin/env bash
# Builds the sdist of a commit, and the wheel from the sdist, with equal bytes wherever one version of setuptools does:
#   bash scripts/release.sh FOLDER [COMMIT]    into FOLDER; COMMIT is HEAD where none is named
# Needs `pip install build 'setuptools>=77'` in the environment of python3, or of the interpreter that PYTHON names.
set -euo pipefail
if [[ ${1:--} = -* ]]; then
    echo "usage: release.sh FOLDER [COMMIT]" >&2
    exit 2
fi
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
commit=$(git -C "$repository" rev-parse --verify "${2:-HEAD}^{commit}")
SOURCE_DATE_EPOCH=$(git -C "$repository" log -1 --format=%ct "$commit") # what the wheel's files are dated by
export SOURCE_DATE_EPOCH
umask 022
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

mkdir "$scratch/source" "$scratch/unpacked"
shipped=(mis_plugins true_on_policy yaml setup.py pyproject.toml README.md LICENSE)
git -C "$repository" archive "$commit" -- "${shipped[@]}" | tar -x -C "$scratch/source"
"${PYTHON:-python3}" -m build --no-isolation --outdir "$scratch/built" "$scratch/source" >"$scratch/log" 2>&1 || {
    cat "$scratch/log" >&2
    exit 1
}
# setuptools packs an sdist with the times and owners of this machine.
sdist=$(basename "$scratch"/built/*.tar.gz)
tar -xzf "$scratch/built/$sdist" -C "$scratch/unpacked"
tar --sort=name --format=ustar --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    -C "$scratch/unpacked" -c "${sdist%.tar.gz}" | gzip -9n >"$scratch/built/$sdist"
mv "$scratch"/built/* "$folder/"
ls -l "$folder"/*.whl "$folder/$sdist"
