# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/.ready

.PHONY: setup demo test test-all test-oldest campaign check format bench papers clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $(READY)

demo: setup
	$(BIN)/elbowroom demo --plot elbowroom-demo.png

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"  # a file's programs are compiled but once

test-all: setup
	HYPOTHESIS_PROFILE=more $(BIN)/python -m pytest -n 2 --dist loadfile

# The oldest PyTorch that is supported, which has only builds with CUDA on PyPI.
$(OLDEST_READY): pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[tests]" torch==2.11.0
	touch $(OLDEST_READY)

test-oldest: $(OLDEST_READY)
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile -m "not slow" tests/session tests/capture tests/execute

campaign: setup
	PYTHONPATH=tests $(BIN)/python -m campaign --runs 5000 --jobs 2 --out build/campaign

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/solvers.py

# The papers' figures and docs/papers.md: all that needs no GPU, and what is stored of the rest. Chains are solved once
# and kept in benchmarks/results: without what is kept it takes about half an hour on two cores, with it minutes.
PAPERS := $(BIN)/python benchmarks/papers
papers: setup
	$(PAPERS)/joins.py --plot-dir docs/papers --claims benchmarks/results/paper-000.json
	$(PAPERS)/rotor.py --plot-dir docs/papers
	$(PAPERS)/offloading.py --plot-dir docs/papers
	$(PAPERS)/offloading_proofs.py
	$(PAPERS)/lower_sets.py --plot docs/papers/002-tables.png --json benchmarks/out/paper-002.json
	$(PAPERS)/batch_sizes.py --show benchmarks/results/paper-002-batches-h200.json --plot docs/papers/002-3.png
	$(PAPERS)/checkpoint_selection.py --plot-dir docs/papers
	$(PAPERS)/selection_phases.py --plot-dir docs/papers
	$(PAPERS)/page.py

clean:
	rm -rf $(VENV) $(OLDEST) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
