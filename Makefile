# make test     install into .venv, lint, type check, run every test
# make demo     train, kill, resume, compare: examples/train_lm.py on real text
# make bench    stall and throughput of a save, next to what the machine can do
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=

.DEFAULT_GOAL := test
.PHONY: test lint pytest test-faults demo bench clean

test: lint pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The crash matrix by itself: all of it (`make test` runs some of its cells), verbose.
test-faults: $(INSTALLED)
	CKPT_CRASH_MATRIX=full $(BIN)/python -m pytest -v tests/crash $(PYTEST_ARGS)

demo: $(INSTALLED)
	$(BIN)/python -m tools.demo

bench: $(INSTALLED)
	$(BIN)/python -m tools.bench.save

# The stamp is written last: an installation that was interrupted is done again.
$(INSTALLED): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,tools]'
	touch $@

clean:
	rm -rf $(VENV) demo-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
