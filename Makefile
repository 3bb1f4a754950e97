# make demo and make test set everything up by themselves; the second time they are quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOINED := $(VENV)/.integrations
OLDEST := .venv-oldest

.PHONY: setup demo test test-slow test-integrations test-oldest lint docs bench clean
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

# With the lowest versions of everything but torch and the frameworks: what prints, draws, serves and tracks.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile -m 'not slow' tests/cli tests/timeline tests/trackers tests/watch \
	  tests/machine tests/record tests/bench/test_report.py tests/integrations/test_trackers_of_libraries.py

$(OLDEST)/.ready: pyproject.toml constraints.txt oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint oldest.txt $$(grep '^torch==' constraints.txt) \
	  --editable '.[report,watch,data,bench,tensorboard,wandb,mlflow,trackio,notebook]' pytest pytest-xdist hypothesis selenium uv
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
	rm -rf $(VENV) $(OLDEST) runs dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
