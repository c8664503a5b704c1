# Every target works from a bare clone: .venv is made and filled with pinned packages first.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help venv demo test test-long test-all lint gallery bench clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zerobubble needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(RUN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

venv: $(READY) ## create .venv with everything pinned

demo: $(READY) ## train a small GPT over 4 pipeline ranks and write a report (about 3 minutes)
	$(RUN)/python examples/train_gpt.py --ranks 4 --out demo-report

test: $(READY) ## run the tests
	$(RUN)/python -m pytest

test-long: $(READY) ## run the tests that take minutes each
	$(RUN)/python -m pytest -m long

test-all: test test-long ## run both

lint: $(READY) ## check style, types and the import floors
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

gallery: $(READY) ## draw every schedule again: docs/gallery and the README's picture
	$(RUN)/python docs/gallery/generate.py

bench: $(READY) ## run the benchmarks and rewrite their JSON
	$(RUN)/python benchmarks/executor/run.py
	$(RUN)/python benchmarks/split/run.py
	$(RUN)/python benchmarks/split_matrix/run.py
	$(RUN)/python benchmarks/graph_split/run.py
	$(RUN)/python benchmarks/post_validation/run.py
	$(RUN)/python benchmarks/truth/run.py
	$(RUN)/python benchmarks/memory/run.py
	$(RUN)/python benchmarks/gpu/run.py
	$(RUN)/python benchmarks/scale/run.py
	$(RUN)/python benchmarks/planner/run.py --fresh
	$(RUN)/python benchmarks/planner/noise.py

clean: ## remove the environment and everything generated
	rm -rf $(VENV) demo-report build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
