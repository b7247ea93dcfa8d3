# make demo   train the tiny model on a CPU and print what it learned
# make test   lint, types and tests, as CI runs them
# make bench  every benchmark; prints tables and writes benchmarks/results/*.json

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench install clean

install: $(VENV)/.installed

# --no-compile: Python compiles what it imports; compiling everything takes longer than the rest.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		--editable '.[agentscope1,examples]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		--editable '.[agentscope1,examples,dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/gsm8k/main.py continue_from_checkpoint=false $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt trl
	for benchmark in benchmarks/[a-z]*.py; do $(BIN)/python $$benchmark || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
