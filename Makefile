# Each target makes .venv first when it is missing, and installs what the target needs.
#   make PYTHON=python3.12 ...           choose the Python that .venv is made with
#   make demo CONFIG=configs/smallest.toml ARGS="--steps 20"
#   make test ARGS="tests/train/test_numbers.py -k os_g"
#   make test JOBS=0                     one process, for a debugger
#   make test-all SHARD=1/8              the first of eight parts

CONFIG ?= configs/demo.toml
ARGS   ?=
SHARD  ?=
VENV   ?= .venv
JOBS   ?= logical
export PYTHON
# A container's setting: each of the tests' many processes compiled gshard's modules for itself.
unexport PYTHONDONTWRITEBYTECODE

# One worker more than cores, fewer where memory is short (tests/tiers.py); a worker that has nothing
# left takes tests from the others.
PYTEST := $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(if $(SHARD),--shard $(SHARD))

# Tests of a second or less: boundaries, rules, words, parsing, planning.
FASTEST := tests/test_imports.py tests/test_language.py tests/test_mutations.py tests/test_project.py \
    tests/_util/test_jaxpr.py tests/sharding/test_rules.py tests/analysis/hlo tests/analysis/html

.NOTPARALLEL:  # or `make -j` would run several installs and tests in $(VENV) at once
.PHONY: help demo demo-moe check test test-all docs gpu-check wire-check lint format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@echo "gshard: ZeRO data parallelism for JAX and Flax"
	@echo
	@grep -E '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1 # /' \
	    | awk -F ' # ' '{ printf "%-16s %s\n", $$1, $$2 }'
	@echo
	@echo "The first call makes $(VENV) (Python 3.11 or newer) and installs into it."

demo: setup-test  ## train a small GPT at every level on 8 virtual devices, and kill one (4 minutes)
	$(VENV)/bin/python -m examples.train_gpt $(CONFIG) $(ARGS)
	$(VENV)/bin/python -m examples.kill_and_resume $(CONFIG) $(ARGS)

demo-moe: setup-test  ## train a small mixture of experts, kept on 8 virtual devices, beside a dense GPT (4 minutes)
	$(VENV)/bin/python -m examples.train_moe $(if $(filter $(origin CONFIG),file),configs/moe.toml,$(CONFIG)) $(ARGS)

check: lint  ## the linters and the fastest tests, before a commit (1 minute)
	$(VENV)/bin/python -m pytest -q -m "not slow" $(FASTEST)

test: setup-test  ## the quick tier of the tests (5-7 minutes on 2 cores)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup-all  ## every test, or those in SHARD=1/8 or ARGS=; updates docs/development/test-record.md (3 hours on 2 cores)
	$(PYTEST) -p tests.record $(ARGS)

docs: setup-docs  ## the site, in build/site: warnings and broken links are errors (1 minute)
	$(VENV)/bin/python -m scripts.site_pages build/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict $(ARGS)

gpu-check: setup-test  ## what works on this machine's GPUs, and how fast: gpu-check/report.md (25 minutes)
	$(VENV)/bin/python -m benchmarks.gpu $(ARGS)

wire-check: setup-compilers  ## bytes, overlap and peaks of programs for GPU and TPU, against those recorded (10-20 minutes)
	$(VENV)-compilers/bin/python -m benchmarks.wire_rows $(ARGS)

lint: setup-dev  ## ruff (lint, format) and pyright
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python scripts/check_toml.py

format: setup-dev  ## let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove caches and what the demo wrote (.venv stays)
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist demo-output* gpu-check
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

.PHONY: setup-test setup-dev setup-docs setup-stores setup-all setup-compilers
setup-test:
	@scripts/venv.sh $(VENV) test,plot,data

setup-dev: setup-test
	@scripts/venv.sh $(VENV) dev

setup-docs:
	@scripts/venv.sh $(VENV) docs

setup-stores:  # servers of S3 and Google Cloud Storage; their tests are skipped without
	@scripts/venv.sh $(VENV) stores

setup-all:  # also the writers of gshard.Metrics, what other projects' code needs, and Ray
	@scripts/venv.sh $(VENV) test,plot,data,dev,docs,stores,tensorboard,wandb,others

setup-compilers:  # for GPU and TPU; beside them a test run would ask for such devices
	@scripts/venv.sh $(VENV)-compilers aot-gpu,aot-tpu
