# Everything a developer runs. Each target makes the virtual environment it needs and does nothing twice.
#   PYTHON=python3.12   the interpreter to make .venv with (3.11 or later; default: the first that fits)
#   ARGS="..."          passed on to the program behind the target
#   WORKERS=4           how many processes run tests side by side (default 4; 0: none but pytest itself)
#   SEED=7              other random examples in another order (default 1: what failed here fails everywhere)

.DEFAULT_GOAL := help
PART_TESTS = test-serve test-services test-tools test-simulation test-connectors-fast test-repository
.PHONY: help demo test test-all test-seconds $(PART_TESTS) world test-vllm test-sglang test-envoy test-random power canary test-connectors test-connectors-0.33 charts chart-docs release lint format types check docs lock clean
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.installed-dev
ROUTER := $(VENV)/.installed-router
CHARTS := $(VENV)/.installed-charts
RELEASE := $(VENV)/.installed-release
# More workers than the two cores it is meant for: tests of servers and processes wait. Each costs four seconds of a core.
# A worker takes files in a row, and the rest of another's when it has none: servers are started once or
# twice, and no long file is left for the end. tests/vllm is not for here; importing it takes four seconds.
parallel = -n $(or $(WORKERS),4) --dist worksteal --ignore tests/vllm
seed = $(or $(SEED),1)
seeds = --hypothesis-seed=$(seed) --randomly-seed=$(seed)
# Tests of connectors/ that import nothing of vLLM: they need no second run on another version of it.
WITHOUT_VLLM = tier transfer store/test_block_store_contract.py store/test_redis_store.py
PIP_INSTALL = $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Workers that each compile all tests (PYTHONDONTWRITEBYTECODE) take half a minute of a core.
export PYTHONDONTWRITEBYTECODE :=
# Of one part (scripts/parts.py), by the name of the target: the fast tests, with ALL=1 all that need no vLLM.
fast = not vllm and not envoy and not process and not long
test_part = $(if $(option_ALL),KVATLAS_TEST_EXAMPLES=ci )$(BIN)/python -m pytest $(parallel) $(seeds) \
	-m "$(if $(option_ALL),not vllm and not envoy,$(fast))" $$($(BIN)/python scripts/parts.py $(patsubst test-%,%,$(@:-fast=))) $(ARGS)
LOCKED = --constraint requirements/dev.txt  # the versions that CI has tested; `make lock` updates them

# Only what was said to make counts: a shell may have variables of these names.
option_IMAGE = $(if $(filter command,$(origin IMAGE)),$(IMAGE))
option_ALL = $(if $(filter command,$(origin ALL)),$(ALL))
demo_option = $(if $(filter command,$(origin $(1))),--$(2) $($(1)))

help: ## Show what there is to run
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(if $(DEMO_REPLICAS),$(DEV),$(ROUTER)) ## A fleet of simulated engines behind the router, live (SECONDS=30 ENGINES=4 DEMO_REPLICAS=2 ARGS="--json")
	@$(BIN)/kvatlas demo $(call demo_option,SECONDS,seconds) $(call demo_option,ENGINES,engines) \
		$(call demo_option,DEMO_REPLICAS,replicas) $(ARGS)

test: $(DEV) ## The fast tests: no long ones, an eighth of the random examples, one of each kind that starts processes
	@$(BIN)/python -m pytest $(parallel) $(seeds) -m "$(fast)" $(ARGS)

test-all: $(DEV) ## All tests but those that need a real vLLM
	@KVATLAS_TEST_EXAMPLES=ci $(BIN)/python -m pytest $(parallel) $(seeds) -m "not vllm and not envoy" $(ARGS)

test-serve: ## Fast tests of serve, the part that serves requests (ALL=1, as for the next: all tests of the part)
test-services: ## Fast tests of services: endpoint picker, sources of engines
test-tools: ## Fast tests of tools: the commands that look at a fleet or its events
test-simulation: ## Fast tests of simulation: simulate, advise, demo
test-connectors-fast: ## Fast tests of connectors, those that need no vLLM, and of publisher/
test-repository: ## Fast tests of the repository: pages, wheel, chart

$(PART_TESTS): $(DEV)
	@$(test_part)

test-seconds: $(DEV) ## Predicted times to first token on engines whose steps last a known time: the targets, the table and vLLM's Scheduler (virtual time), two vLLM engines
	@$(BIN)/python -m pytest $(call parallel,4) tests/router/placement/test_known_steps.py $(ARGS)
	@$(BIN)/python -m benchmarks.known_steps
	@python=$$(scripts/vllm_env.sh) && export KVATLAS_VLLM_PYTHON="$$python" && \
		$(BIN)/python -m pytest -m vllm -n 0 -s tests/vllm/test_known_steps.py && $(BIN)/python -m benchmarks.known_steps_engines

world: $(DEV) ## The whole fleet on virtual time: plans of found defects, then 60 seeds (SEED=5000 SEEDS=200 KIND=pd)
	@PYTHONHASHSEED=0 $(BIN)/python -m tests.world $(call demo_option,SEED,seed) $(call demo_option,SEEDS,seeds) \
		$(call demo_option,KIND,kind) $(ARGS)

test-vllm: $(DEV) ## Tests against real vLLM engines on the CPU (installs vLLM on first use)
	@python=$$(scripts/vllm_env.sh) && next=$$(scripts/vllm_overlay_env.sh 0.33.0 || true) && \
		KVATLAS_VLLM_PYTHON="$$python" KVATLAS_VLLM_033_PYTHON="$$next" \
		KVATLAS_RANDOM_SEED="$(seed)" $(BIN)/python -m pytest $(seeds) -m vllm --timeout 1200 $(ARGS)

test-random: $(DEV) ## Random mixes of groups and traffic through vLLM's scheduler, 0.32 and 0.33 (MIXES=2000 SEED=x for the same again)
	@python=$$(scripts/vllm_env.sh) && next=$$(scripts/vllm_overlay_env.sh 0.33.0) && \
		KVATLAS_VLLM_PYTHON="$$python" KVATLAS_VLLM_033_PYTHON="$$next" \
		KVATLAS_RANDOM_MIXES="$(MIXES)" KVATLAS_RANDOM_SEED="$(SEED)" \
		$(BIN)/python -m pytest -m vllm tests/vllm/test_random_mixes.py --timeout 0 -rP $(ARGS)

canary: $(DEV) ## A release against the rules: a table of what differs (VERSION=0.33.0 MIXES=100 SEED=1; ENGINE=sglang VERSION=0.5.23)
	@$(BIN)/python scripts/canary.py $(or $(VERSION),$(if $(filter sglang,$(ENGINE)),0.5.23,0.33.0)) --engine $(or $(ENGINE),vllm) --mixes $(or $(MIXES),100) --seed $(seed) $(ARGS)

power: $(DEV) ## How many one-line mutations of a part its fast tests catch (PART=placement SAMPLE=40 SEED=1)
	@$(BIN)/python scripts/power.py $(or $(PART),placement) --sample $(or $(SAMPLE),40) --seed $(seed)

test-envoy: $(DEV) ## Tests of the endpoint picker behind a real Envoy (installs it on first use)
	@envoy=$$(scripts/envoy_env.sh) && KVATLAS_ENVOY="$$envoy" $(BIN)/python -m pytest $(seeds) -m envoy $(ARGS)

SGLANG_WHEELS = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvatlas/sglang-0.5.23
test-sglang: $(DEV) ## Tests against the radix cache and events of SGLang's wheel (downloads it on first use)
	@ls $(SGLANG_WHEELS)/*.whl >/dev/null 2>&1 || \
		$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --dest $(SGLANG_WHEELS) sglang==0.5.23
	@python=$$(scripts/vllm_env.sh) && KVATLAS_VLLM_PYTHON="$$python" \
		KVATLAS_SGLANG_WHEEL="$$(ls $(SGLANG_WHEELS)/*.whl)" $(BIN)/python -m pytest $(seeds) tests/publisher/test_sglang_events.py \
		tests/router/prompts/test_sglang_chats.py $(ARGS)

test-connectors: $(DEV) ## Tests of connectors/ inside the environment that has torch and vLLM (installs it on first use)
	@python=$$(scripts/vllm_env.sh) && "$$python" -m pytest $(seeds) tests/connectors --timeout 1200 $(ARGS)

test-connectors-0.33: $(DEV) ## The same on the Python of vLLM 0.33 over 0.32's compiled modules: what imports vLLM
	@python=$$(scripts/vllm_overlay_env.sh 0.33.0) && \
		"$$python" -m pytest $(seeds) tests/connectors $(addprefix --ignore=tests/connectors/,$(WITHOUT_VLLM)) --timeout 1200 $(ARGS)

charts: $(CHARTS) ## The Helm chart, rendered and checked against the schemas of three Kubernetes versions
	@$(BIN)/python scripts/generate_chart_reference.py --check
	@$(BIN)/python -m pytest tests/charts $(ARGS)

chart-docs: $(CHARTS) ## Write the chart's schema and table of values from its values.yaml
	@$(BIN)/python scripts/generate_chart_reference.py

release: $(RELEASE) ## Wheel, source archive, chart, image and their checksums in dist/, each tried (IMAGE=1: the image must be)
	@$(BIN)/python scripts/release.py $(if $(option_IMAGE),--image)

lint: $(DEV) ## Style, likely mistakes, import layers, structure
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python scripts/check_structure.py

format: $(DEV) ## Rewrite what `lint` can mend by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(CHARTS) ## Static types, strict, of the tests of the chart too
	@$(BIN)/mypy

check: lint types test ## What must pass before a change is pushed

docs: $(DEV) ## Write docs/cli.md, configuration.md and metrics.md from the code
	@$(BIN)/python scripts/generate_reference.py

lock: $(DEV) ## Pin what the container image installs to the newest versions that fit
	@$(PIP_INSTALL) 'uv>=0.5'
	@BIN=$(BIN) scripts/lock.sh

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .venv-3.* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(BIN)/python:
	@PYTHON="$(PYTHON)" scripts/make_venv.sh $(VENV)

$(ROUTER): $(BIN)/python pyproject.toml
	@echo "installing kvatlas into $(VENV)"
	@$(PIP_INSTALL) $(LOCKED) --editable .
	@touch $@

$(DEV): $(BIN)/python pyproject.toml
	@echo "installing kvatlas and its development tools into $(VENV)"
	@$(PIP_INSTALL) $(LOCKED) --editable '.[dev]'
	@touch $@ $(ROUTER)

$(CHARTS): $(DEV) pyproject.toml
	@echo "installing Helm's engine and Kubernetes' schemas into $(VENV)"
	@$(PIP_INSTALL) $(LOCKED) --editable '.[charts]'
	@touch $@

$(RELEASE): $(CHARTS) pyproject.toml
	@echo "installing the tool of the bill of materials into $(VENV)"
	@$(PIP_INSTALL) $(LOCKED) --editable '.[release]'
	@touch $@
