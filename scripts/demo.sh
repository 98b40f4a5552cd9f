#!/usr/bin/env bash
# From a fresh machine to the demo in one command; arguments go to `sglang-dcp demo`.
#
#   scripts/demo.sh                          tp 2, DCP 2; on CPU ranks if there are not 2 GPUs
#   scripts/demo.sh --tp 8 --dcp-size 8
#   scripts/demo.sh --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
ensure_venv ""
exec "$venv/bin/sglang-dcp" demo "$@"
