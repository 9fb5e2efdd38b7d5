# Every habit of this project has one target here; CI calls these and nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}'

$(INSTALLED): requirements/bootstrap.lock requirements/dev.lock server/pyproject.toml sdk/python/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Fencepost needs Python 3.11 or newer; say PYTHON=python3.12 make ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.lock
	@$(BIN)/uv pip sync -q --require-hashes requirements/dev.lock
	@$(BIN)/uv pip install -q --no-deps --no-build-isolation -e sdk/python -e server
	@touch $@

.PHONY: setup
setup: $(INSTALLED) ## install everything from the lock into .venv

.PHONY: dev
dev: setup ## start Postgres, server, scheduler, demo worker and demo jobs (ARGS=--reset clears the data)
	@exec $(BIN)/fencepost dev --demo $(ARGS)

.PHONY: test
test: setup ## all tests, against a real Postgres that the tests start (ARGS="-k name" picks some)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: contention
contention: setup ## many engines on the same runs for ten minutes, without a deadlock (FOR=60 for less)
	FENCEPOST_CONTENTION_SECONDS=$(or $(FOR),600) $(BIN)/pytest tests/integration/test_contention.py --log-cli-level=INFO -q

.PHONY: test-unit
test-unit: setup ## the tests that need no service: seconds
	$(BIN)/pytest tests/unit tests/architecture $(ARGS)

.PHONY: format
format: setup ## format Python and protos, sort imports
	$(BIN)/ruff format . && $(BIN)/ruff check --fix . && $(BIN)/buf format -w

.PHONY: lint
lint: setup ## ruff, import layers, buf lint
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/buf lint && $(BIN)/buf format --diff --exit-code

.PHONY: types
types: setup ## mypy strict
	$(BIN)/mypy

.PHONY: generate
generate: setup ## generate the stubs from proto/, and the tables of docs/ from the code
	$(BIN)/buf generate
	@find sdk/python/fencepost/v1 -name '*_pb2_grpc.pyi' | while read -r stub; do [ -e "$${stub%i}" ] || rm "$$stub"; done
	@$(BIN)/python -m docs.generate

.PHONY: check-generated
check-generated: generate ## fail if what is generated and committed is stale
	@test -z "$$(git status --porcelain -- sdk/python/fencepost/v1 docs README.md)" || { git status --short -- sdk/python/fencepost/v1 docs README.md; echo "generated files are stale: run make generate and commit"; exit 1; }
	@echo "generated files are fresh"

.PHONY: breaking
breaking: setup ## fail if proto/ breaks what the branch main promised
	$(BIN)/buf breaking --against '.git#branch=main'

.PHONY: bench
bench: setup ## the benchmarks; prints figures and ratios, minutes
	$(BIN)/python -m benchmarks

.PHONY: lock
lock: setup ## resolve the newest allowed versions into requirements/*.lock
	requirements/lock.sh

.PHONY: check
check: lint types check-generated test ## all that CI runs, in its order
