# Sourced by demo.sh and test.sh: one virtual environment (11 GB) for both, made once and reused.
#
# SGLANG_DCP_VENV  its folder (default: .venv in this checkout)
# PYTHON           the interpreter that makes it (default: python3; 3.10 or later)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SGLANG_DCP_VENV:-$root/.venv}

# ensure_venv EXTRA: install this checkout, editable, with the extra ("" for none), unless a
# finished installation of the same pyproject.toml is there.
ensure_venv() {
    local extra=$1 python=${PYTHON:-python3} stamp
    stamp="$root $(sha256sum <"$root/pyproject.toml" | cut -c1-16) ${extra:+[$extra]}"
    if grep -qsF "$stamp" "$venv/sglang-dcp.stamp"; then
        return
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: $("$python" --version) was found, but Python 3.10 or later is needed." \
            "Set PYTHON to one." >&2
        return 1
    fi
    echo "Installing into $venv (SGLang and its wheels: some minutes, 11 GB) ..." >&2
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --editable "$root${extra:+[$extra]}" >&2
    echo "$stamp" >>"$venv/sglang-dcp.stamp"
}
