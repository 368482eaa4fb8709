#!/usr/bin/env bash
# Fails if a generated file is stale, or lint, format, types or import contracts are broken.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()
step() {
    echo "== $1"
    shift
    "$@" || failed+=("$*")
}
step "generated files" $bin/python -m disagg_operator.api.crd --check
step "lint" $bin/ruff check .
step "format" $bin/ruff format --check .
step "types" $bin/mypy operator/src router/src connector/src e2e bench
step "import contracts" $bin/lint-imports
if [ ${#failed[@]} -gt 0 ]; then
    printf 'verify failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
