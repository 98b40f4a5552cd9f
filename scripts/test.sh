#!/usr/bin/env bash
# Lint, types and the whole CPU suite, in an environment of its own; arguments go to pytest.
#
#   scripts/test.sh                          everything, about 20 minutes on 2 cores
#   scripts/test.sh -m "not slow"            without servers, a few minutes
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
ensure_venv test
cd "$root"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
exec "$venv/bin/python" -m pytest "$@"
