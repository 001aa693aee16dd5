#!/usr/bin/env bash
# Make .venv and install the workbench into it:  [PYTHON=python3.12] ./install.sh cpu|gpu
# `make` calls this; running it again is quick, for pip finds everything in place.
set -euo pipefail
cd "$(dirname "$0")"
kind="${1:?cpu or gpu}"

suits() { # a Python from 3.10 to 3.13 that runs
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        suits "$PYTHON" && { echo "$PYTHON"; return; }
        echo "PYTHON=$PYTHON is no Python from 3.10 to 3.13" >&2
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        suits "$candidate" && { echo "$candidate"; return; }
    done
    echo "found no Python from 3.10 to 3.13; install one, or say make PYTHON=/path/to/python3" >&2
    return 1
}

if ! suits .venv/bin/python; then
    python="$(find_python)"
    if ! "$python" -m venv --clear .venv; then
        echo "$python can't make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
fi

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
quick=()
if [[ "$kind" == cpu && "$(uname -s)" == Linux ]]; then
    # torch from PyPI brings CUDA's wheels; PyTorch's own index has it without. Where that index can't be
    # reached, pip says so after one short try and takes what else there is.
    quick=(--extra-index-url https://download.pytorch.org/whl/cpu --timeout 15 --retries 1)
fi
pip install --quiet "${quick[@]}" "torch==2.13.0"
pip install --quiet --editable ".[$kind,dev]"
echo "installed into .venv ($kind): $(.venv/bin/workbench --version), torch $(.venv/bin/python -c 'import torch; print(torch.__version__)')"
