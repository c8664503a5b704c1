# Every target works from a bare clone: .venv is made and filled with pinned packages first.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready
# The demo uses .venv if it is there. Otherwise it makes an environment with torch and the planner only.
DEMO := $(if $(wildcard $(READY)),$(VENV),$(VENV)-demo)
FRAMEWORKS := $(VENV)-integrations
# The oldest torch that is supported and the newest that was seen; the pinned one is in requirements.txt. Each brings its own sympy; requirements-images.txt is for the pinned one alone.
TORCHES := 2.6.0 2.15.0
# Some containers set it. Then each worker, rank and command of the tests compiles every source anew, for minutes in all.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv gpu demo quick mutants test test-long test-integrations test-all test-versions package lint docs gallery playground bench clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

$(READY): requirements.txt requirements-images.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zerobubble needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(RUN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/image-models --upgrade -r requirements-images.txt
	$(RUN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

venv: $(READY) ## create .venv with everything pinned

$(VENV)-demo/.ready: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zerobubble needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)-demo
	@echo "Installing torch and the planner into $(VENV)-demo, once. The time depends on the network: torch alone has hundreds of MB."
	$(VENV)-demo/bin/pip install --disable-pip-version-check -c requirements.txt setuptools
	$(VENV)-demo/bin/pip install --disable-pip-version-check -c requirements.txt --no-build-isolation -e '.[torch,plan]'
	touch $@

demo: $(if $(wildcard $(READY)),,$(VENV)-demo/.ready) ## train a small GPT over 4 pipeline ranks and write a report (about 3 minutes)
	$(DEMO)/bin/python examples/train_gpt.py --ranks 4 --out demo-report

quick: $(READY) ## check what changed: style, types, floors, and the nearest tests without processes
	$(RUN)/python -m tests.quick

mutants: $(READY) ## make small faults in what judges and moves numbers, and see whether the nearest tests notice (an hour)
	$(RUN)/python -m tests.mutants

test: $(READY) ## run the tests
	$(RUN)/python -m pytest

test-long: $(READY) ## run an eighth of the long tests, and hypothesis on fresh examples; prints its seed, and SEED=N repeats it
	$(if $(SEED),ZEROBUBBLE_SEED=$(SEED)) $(RUN)/python -m pytest -m long

$(FRAMEWORKS)/.ready: requirements-integrations.txt pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -r requirements-integrations.txt
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check --no-deps nemo-automodel==0.7.0 megatron-core==0.16.1 # one wants an older transformers, the other packages for GPUs
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

test-integrations: $(FRAMEWORKS)/.ready ## run the tests inside training frameworks, in an environment of their own; SEED=N adds a share of the long ones
	$(if $(SEED),ZEROBUBBLE_SEED=$(SEED)) $(FRAMEWORKS)/bin/python -m pytest --timeout 1800 $(if $(SEED),-m "long or not long") tests/integrations

test-all: test test-long test-integrations ## run all three

test-versions: $(READY) ## run the process tests on the oldest and the newest torch, too (needs about 12 GB of disk, and an hour)
	for torch in $(TORCHES); do \
	  $(PYTHON) -m venv $(VENV)-torch-$$torch && \
	  $(VENV)-torch-$$torch/bin/pip install --quiet --disable-pip-version-check torch==$$torch && \
	  grep -vE '^(torch|sympy)==' requirements.txt > $(VENV)-torch-$$torch/requirements.txt && \
	  $(VENV)-torch-$$torch/bin/pip install --quiet --disable-pip-version-check -r $(VENV)-torch-$$torch/requirements.txt && \
	  $(VENV)-torch-$$torch/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . && \
	  $(VENV)-torch-$$torch/bin/python -m pytest -W default -m "sweep or not long" tests/procs tests/pure/test_export_torch.py || exit 1; \
	done

package: $(READY) ## build the distributions and run the wheel in empty environments of each Python that is here
	$(RUN)/python -m tests.package

lint: $(READY) ## check style, types and the import floors
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

gpu: $(READY) ## examine the GPUs of this machine, measure and test on them, and write gpu-report (an hour)
	$(RUN)/python benchmarks/gpu/report.py

docs: $(READY) ## write the pages to docs/_build/html; a link that leads nowhere is an error
	$(RUN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

gallery: $(READY) ## draw every schedule again: docs/gallery, the pictures of README and other pages, and the list of public names
	$(RUN)/python -m docs.gallery.generate
	$(RUN)/python -m docs.api

screenshots: $(READY) ## take the screenshots of pages in docs again, with Chromium
	$(RUN)/python -m docs.screenshots

playground: $(READY) ## write docs/playground/index.html: schedules to play with in a browser, opened from the file
	$(RUN)/python -m zerobubble.explorer.playground docs/playground/index.html

bench: $(READY) ## run the benchmarks and rewrite their JSON
	$(RUN)/python benchmarks/executor/run.py
	$(RUN)/python benchmarks/slow_link/run.py
	$(RUN)/python benchmarks/split/run.py
	$(RUN)/python benchmarks/split_step/run.py
	$(RUN)/python benchmarks/checkpoints/run.py
	$(RUN)/python benchmarks/split_matrix/run.py
	$(RUN)/python benchmarks/graph_split/run.py
	$(RUN)/python benchmarks/graph_split/lengths.py
	$(RUN)/python benchmarks/post_validation/run.py
	$(RUN)/python benchmarks/bubble_work/run.py
	$(RUN)/python benchmarks/telemetry/run.py
	$(RUN)/python benchmarks/replicas/run.py
	$(RUN)/python benchmarks/sharded/run.py
	$(RUN)/python benchmarks/survive/run.py
	$(RUN)/python benchmarks/truth/run.py
	$(RUN)/python benchmarks/memory/run.py
	$(RUN)/python benchmarks/gpu/run.py
	$(RUN)/python benchmarks/scale/run.py
	$(RUN)/python benchmarks/view/run.py
	$(RUN)/python benchmarks/cut/run.py
	$(RUN)/python benchmarks/cost_model/run.py
	$(RUN)/python benchmarks/cost_model/ratios.py
	$(RUN)/python benchmarks/planner/run.py --fresh
	$(RUN)/python benchmarks/bounds/run.py
	$(RUN)/python -m benchmarks.axes.run
	$(RUN)/python benchmarks/unequal/run.py
	$(RUN)/python -m benchmarks.slices.run
	$(RUN)/python benchmarks/unequal/steps.py
	$(RUN)/python benchmarks/recompute/run.py
	$(RUN)/python benchmarks/recompute/bytes.py
	$(RUN)/python benchmarks/vocabulary/run.py
	$(RUN)/python benchmarks/divided_head/run.py
	$(RUN)/python benchmarks/offload/run.py
	$(RUN)/python benchmarks/offload/steps.py
	$(RUN)/python benchmarks/offload/paced.py

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(VENV)-demo $(VENV)-torch-* $(FRAMEWORKS) demo-report gpu-report build docs/_build docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
