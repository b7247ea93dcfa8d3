# make demo   train the tiny model on a CPU and print what it learned
# make test   lint, types and tests, as CI runs them
# make test-agentscope2   the tests that need AgentScope 2.x, in an environment of its own
# make test-browser   the page of a run in a real browser; needs Chromium
# make test-frameworks   the tests that need agent frameworks, in an environment of their own
# make test-trinity   the tests that run Trinity-RFT on Ray, in an environment of their own (7 GB)
# make test-vllm   the tests that run vLLM on a CPU, in an environment of their own (3.6 GB)
# make test-sglang   the tests that run SGLang's server on a CPU, in an environment of its own (11 GB)
# make bench  every benchmark; prints tables and writes benchmarks/results/*.json

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV2 := .venv-agentscope2
BIN2 := $(VENV2)/bin
VENV3 := .venv-frameworks
BIN3 := $(VENV3)/bin
VENV4 := .venv-trinity
BIN4 := $(VENV4)/bin
VENV5 := .venv-vllm
BIN5 := $(VENV5)/bin
VENV6 := .venv-sglang

.PHONY: demo test test-agentscope2 test-browser test-frameworks test-trinity test-vllm test-sglang bench install clean

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
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist loadfile

# One environment holds one major version of AgentScope.
$(VENV2)/.installed: pyproject.toml constraints-agentscope2.txt
	$(PYTHON) -m venv $(VENV2)
	$(BIN2)/python -m pip install --quiet --upgrade pip
	$(BIN2)/python -m pip install --quiet --no-compile --constraint constraints-agentscope2.txt torch
	$(BIN2)/python -m pip install --quiet --no-compile --constraint constraints-agentscope2.txt \
		--editable '.[agentscope,examples]' pytest pytest-asyncio
	touch $@

test-agentscope2: $(VENV2)/.installed
	$(BIN2)/pytest tests/integration/agentscope2

test-browser: $(VENV)/.installed-dev
	$(BIN)/pytest tests/browser

$(VENV3)/.installed: pyproject.toml constraints-frameworks.txt
	$(PYTHON) -m venv $(VENV3)
	$(BIN3)/python -m pip install --quiet --upgrade pip
	$(BIN3)/python -m pip install --quiet --no-compile --constraint constraints-frameworks.txt torch
	$(BIN3)/python -m pip install --quiet --no-compile --constraint constraints-frameworks.txt \
		--editable '.[frameworks]' pytest pytest-asyncio
	touch $@

test-frameworks: $(VENV3)/.installed
	$(BIN3)/pytest tests/integration/frameworks

# Compiled: each run starts a dozen processes that import nearly all of it.
$(VENV4)/.installed: constraints-trinity.txt
	$(PYTHON) -m venv $(VENV4)
	$(BIN4)/python -m pip install --quiet --upgrade pip
	$(BIN4)/python -m pip install --quiet --no-deps --requirement constraints-trinity.txt
	$(BIN4)/python -m pip install --quiet --no-compile --no-deps --editable .
	touch $@

# Where these packages cannot be had, it says so and does not fail; that no test ran is seen.
test-trinity:
	@if $(MAKE) $(VENV4)/.installed; then $(BIN4)/pytest tests/integration/trinity $(ARGS); \
	else echo "SKIPPED: test-trinity ran no test: constraints-trinity.txt cannot be installed here" >&2; fi

# Compiled, unlike the others: each start of vLLM imports it in three processes.
$(VENV5)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENV5)
	$(BIN5)/python -m pip install --quiet --upgrade pip
	$(BIN5)/python -m pip install --quiet --compile --no-deps --requirement constraints-vllm.txt
	$(BIN5)/python -m pip install --quiet --no-deps --editable .
	touch $@

# Where these packages cannot be had, it says so and does not fail; that no test ran is seen.
test-vllm:
	@if $(MAKE) $(VENV5)/.installed; then $(BIN5)/pytest tests/integration/vllm tests/engines/test_grammar.py; \
	else echo "SKIPPED: test-vllm ran no test: constraints-vllm.txt cannot be installed here" >&2; fi

# Its server runs there; the tests run in the first environment. It pins its own dependencies.
$(VENV6)/.installed:
	$(PYTHON) -m venv $(VENV6)
	$(VENV6)/bin/python -m pip install --quiet --upgrade pip
	$(VENV6)/bin/python -m pip install --quiet 'sglang==0.5.23'
	touch $@

# Where these packages cannot be had, it says so and does not fail; that no test ran is seen.
test-sglang: install
	@if $(MAKE) $(VENV6)/.installed; then \
	SGLANG_PYTHON=$(CURDIR)/$(VENV6)/bin/python $(BIN)/pytest tests/integration/sglang; \
	else echo "SKIPPED: test-sglang ran no test: sglang cannot be installed here" >&2; fi

# LiteLLM, a peer of the gateway's benchmark, wants other versions than we do.
.venv-litellm/bin/litellm:
	$(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/python -m pip install --quiet --no-compile 'litellm[proxy]==1.106.2'

bench: $(VENV)/.installed-dev .venv-litellm/bin/litellm
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt trl
	for benchmark in benchmarks/[a-z]*.py; do $(BIN)/python $$benchmark || exit 1; done

clean:
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
