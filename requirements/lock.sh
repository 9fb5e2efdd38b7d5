#!/usr/bin/env bash
# Resolves the newest allowed versions again and writes both locks (with hashes,
# without addresses). Run by `make lock` only; everyone else installs what it wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
"$uv" pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
  requirements/bootstrap.in -o requirements/bootstrap.lock
"$uv" pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
  --no-emit-package fencepost --no-emit-package fencepost-server \
  requirements/dev.in server/pyproject.toml sdk/python/pyproject.toml -o requirements/dev.lock
