#!/usr/bin/env bash
# Creates .venv from the hashed lock file and links the three packages into it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "DisaggInference needs Python 3.11 or newer; '$python' is $("$python" -V 2>&1). Set PYTHON=/path/to/python3.11." >&2
    exit 1
fi
if [ ! -x .venv/bin/pip ]; then
    "$python" -m venv --clear .venv || { echo "Creating .venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
fi
.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
.venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes -r requirements/dev.txt
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation -e operator -e router -e connector
touch .venv/ready
