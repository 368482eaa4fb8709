# Everything is run from here. Longer work lives in hack/ and e2e/.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv/bin
CLUSTER ?= local
KEEP ?=
export CLUSTER
# Packages come over a network that fails at times; uv asks three times within seconds.
export UV_HTTP_RETRIES ?= 10
export UV_HTTP_TIMEOUT ?= 120
# These tests share nothing, so they run side by side: three at once on two cores, since some wait for time to pass.
# Without compiled modules each of their processes would spend longer on importing than on most tests.
UNIT_TESTS := PYTHONDONTWRITEBYTECODE= $(VENV)/pytest -m "not engine and not cluster" --numprocesses=3 --dist=worksteal --timeout=360
# One that hangs is to be told of by the run in which it hangs, which may take 90 minutes where this is the gate: no test
# takes 900 s, even on a machine a third as fast, and what has failed so far is shown before a longer run is cut off.
LIMITS := --timeout=900 --session-timeout=4800

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n\033[1m%s\033[0m\n", substr($$0, 5)} \
	  /^[a-zA-Z0-9_-]+:.*?##/ {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Try it
.PHONY: demo
demo: .venv/ready ## Cluster up, operator installed, a conversation held; KEEP=1 leaves it running
	$(VENV)/python -m e2e.demo $(if $(KEEP),--keep)

.PHONY: cluster-up
cluster-up: .venv/ready ## A local Kubernetes with the images loaded; prints the kubeconfig's path
	$(VENV)/python -m e2e.cluster up

.PHONY: cluster-down
cluster-down: .venv/ready ## Take the local cluster down, leaving nothing behind
	$(VENV)/python -m e2e.cluster down

##@ Test
.PHONY: test
test: verify prepare ## Everything: lint, types, unit, contract tests, real engines, cluster scenarios
	$(UNIT_TESTS)
	$(VENV)/pytest -m "(engine or cluster) and not thorough" $(LIMITS) --durations=20

.PHONY: test-unit
test-unit: .venv/ready ## The quick loop: unit and contract tests, no cluster, no engines
	$(UNIT_TESTS) -q

.PHONY: test-connector
test-connector: .venv/ready ## The connector against real engines on CPU; writes build/reports/connector.json
	$(VENV)/python -m pytest -q connector/tests -m engine -p connector.tests.engine.report

.PHONY: test-cluster
test-cluster: .venv/ready ## The scenarios on a real cluster
	$(VENV)/pytest -q e2e -m cluster

##@ Measure
.PHONY: bench-footprint
bench-footprint: .venv/ready ## CPU and memory of operator, router and engines at rest, in the running cluster
	$(VENV)/python -m bench.footprint

.PHONY: bench-connector
bench-connector: .venv/ready ## CPU of the connector's hooks in an engine step; BEFORE=FOLDER compares with another connector/src
	$(VENV)/python -m bench.connector_step $(if $(BEFORE),--before $(BEFORE))

.PHONY: bench-router
bench-router: .venv/ready ## What the router costs on the way of a stream, beside PyPI's vllm-router; writes build/reports/router.json
	$(VENV)/python -m bench.router

.PHONY: bench-local-prefill
bench-local-prefill: .venv/ready ## Where prompts are computed best, on simulated engines; draws docs/benchmarks/local-prefill.png
	$(VENV)/python -m bench.local_prefill

.PHONY: sim
sim: .venv/ready ## How well rules size the pools, this operator's and its peers', on simulated engines; draws docs/autoscaling/
	$(VENV)/python -m bench.autoscaling

##@ Develop
.PHONY: prepare
prepare: .venv/ready ## Build and cache what tests and demo need: Kubernetes, vLLM on CPU, the models
	$(VENV)/python -m e2e.prepare

.PHONY: verify
verify: .venv/ready ## Generated files, lint, format, types, import contracts
	hack/verify.sh

.PHONY: fmt
fmt: .venv/ready ## Format and fix
	$(VENV)/ruff format . && $(VENV)/ruff check --fix .

.PHONY: crds
crds: .venv/ready ## Regenerate the CRDs and the API reference from the types
	$(VENV)/python -m disagg_operator.api.crd

.PHONY: lock
lock: .venv/ready ## Rewrite the hashed lock files from requirements/*.in
	UV=$(abspath $(VENV)/uv) hack/lock.sh

.venv/ready: requirements/dev.txt requirements/uv.txt hack/venv.sh operator/pyproject.toml router/pyproject.toml connector/pyproject.toml
	hack/venv.sh
