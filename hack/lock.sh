#!/usr/bin/env bash
# Rewrites the hashed lock files from their .in files. Run it after editing a .in file.
set -euo pipefail
cd "$(dirname "$0")/../requirements"
uv=${UV:-uv}
common=(--generate-hashes --python-version 3.11 --no-emit-index-url --no-header --quiet)
for name in uv operator router dev bench-router; do
    "$uv" pip compile "$name.in" -o "$name.txt" --universal "${common[@]}"
done
"$uv" pip compile engine-cpu.in --override engine-cpu.override -o engine-cpu.txt "${common[@]}"
"$uv" pip compile engine-next.in --no-deps -o engine-next.txt "${common[@]}"
