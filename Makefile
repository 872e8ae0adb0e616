# make setup  prepare .venv (returns at once when nothing changed)
# make demo   the main job: an RL loop against a live server with hot-loaded weights (DEMO_ARGS="--steps 20")
# make test   all tests        make check  lint and types        make ci  what CI runs
# make bench  benchmarks, JSON in benchmarks/results
PYTHON ?= python3
VENV ?= .venv
TORCH ?= -r requirements/cpu.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_ARGS ?=
TEST_ARGS ?=

.PHONY: setup demo test check bench ci clean
setup: $(STAMP)

$(STAMP): pyproject.toml requirements/cpu.txt requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("midstream needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt -e '.[engine,demo,dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/midstream demo $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest $(TEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	cd benchmarks && ../$(BIN)/python serving.py --write
	cd benchmarks && ../$(BIN)/python gateway_cpu.py --write

ci: check test

clean:
	rm -rf $(VENV) .midstream demo-out .pytest_cache .mypy_cache .ruff_cache
