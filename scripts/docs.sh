#!/usr/bin/env bash
# Builds the pages as a site in build/site/html. A link to a missing page or heading ends it with exit code 1, and so
# does one of the built site.
#   bash scripts/docs.sh            some ten seconds after the first install
#   bash scripts/docs.sh --serve    and shows it at http://localhost:8000
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

python -c 'import latex2mathml, mkdocstrings, zensical' 2>/dev/null ||
    python -m pip install -qq --editable '.[docs]' --constraint constraints.txt
python scripts/site_pages.py build/site/pages
NO_COLOR=1 zensical build --strict
python scripts/site_pages.py --check build/site/html
echo "wrote $repository/build/site/html"
if [ "${1:-}" = --serve ]; then exec python -m http.server --bind 127.0.0.1 --directory build/site/html 8000; fi
