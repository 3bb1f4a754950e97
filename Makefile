# make demo and make test set everything up by themselves; the second time they are quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOINED := $(VENV)/.integrations

.PHONY: setup demo test test-slow test-integrations lint docs bench clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/outrider demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' --ignore tests/integrations

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow --ignore tests/integrations

test-integrations: $(JOINED)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/integrations

$(JOINED): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,integrations]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps timm
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python docs/tables.py

bench: $(READY)
	$(BIN)/python -m outrider.bench.overhead

clean:
	rm -rf $(VENV) runs dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
