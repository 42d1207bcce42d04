# The commands a user or CI needs. `make` alone lists them.

# cpu or gpu: which vLLM and PyTorch are installed. A CUDA toolkit without a GPU does not count.
DEVICE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo gpu || echo cpu)
# The Python that builds .venv; the first that fits, unless one is named.
PYTHON ?= python3 python3.11 python3.12
FITS := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
# More for pytest, as in: make test ARGS="tests/buffer -x"
ARGS ?=
# Parallel test processes: two for each of two cores, since tests wait for processes of their own.
PROCESSES ?= 4
# Seed of the kills (which actor, when), as in: make test-chaos SEED=3 ARGS="--only shard"
SEED ?= 0

BIN := .venv/bin
STAMP = .venv/installed-for-$(DEVICE)
DOCS_STAMP := .venv/installed-docs
# What `make parity` compares with lies beside .venv and sees its packages.
PARITY := .venv-parity
CHROMIUM := .venv/chromium/chromium
# Tests of one file, and those that share a run or an engine, stay on one process.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup
# A single GPU is shared by trainer and generator, whose KV cache would take the rest of its memory.
DEMO_ON_gpu := generator.kv_cache_mb=1024
BASE_MODEL = $(BIN)/python examples/arithmetic/make.py

.PHONY: help install demo test test-all test-chaos gpu-check parity parity-env chromium pictures lint docs clean

help: ## list these targets (the default)
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' Makefile

install: $(STAMP) ## build .venv, for the GPU if there is one (DEVICE=cpu or DEVICE=gpu decides)
	@echo 'streamrl: .venv is installed for $(DEVICE)'

demo: $(STAMP) ## train a small model to add with GRPO, into runs/demo
	$(BASE_MODEL)
	$(BIN)/streamrl train configs/grpo_arithmetic.yaml run.name=demo run.overwrite=true $(DEMO_ON_$(DEVICE))

test: $(STAMP) ## run the quick tests, the linters among them (ARGS="..." goes to pytest)
	$(BASE_MODEL)
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: $(STAMP) $(DOCS_STAMP) $(PARITY)/installed $(CHROMIUM) ## run every test that needs no GPU, random schedules six times as long
	$(BASE_MODEL)
	STREAMRL_TEST_BUDGET=3 $(PYTEST) $(ARGS)

test-chaos: $(STAMP) ## kill -9 every kind of process at every moment of a run; 8 to 11 minutes (SEED=3)
	$(BIN)/python -m tests.chaos.run_chaos --seed $(SEED) $(ARGS)

gpu-check: $(STAMP) ## check ranks, vLLM, trainer, memory and speed on 1 to 8 GPUs, at most 25 minutes (ARGS="--resume")
	$(BIN)/python scripts/gpu_check.py $(ARGS)

parity: $(PARITY)/installed ## compare our functions with those of verl and TRL (ARGS="--seed 3")
	$(PARITY)/bin/python -m tests.parity.compare $(ARGS)

parity-env: $(PARITY)/installed ## build what `make parity` and benchmarks.trl compare with

chromium: $(CHROMIUM) ## bring the browser that tests of pages, their benchmark and pictures use

# The site without -W: pages may name a picture that is not there yet.
pictures: $(CHROMIUM) $(DOCS_STAMP) ## take the pictures of the docs anew: two short runs, their page, the site
	$(BASE_MODEL)
	$(BIN)/python -m sphinx -q -c docs . build/pictured_docs
	$(BIN)/python -m scripts.make_pictures $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# A page with a warning would not be read again, and so not warned of, by the next build.
docs: $(DOCS_STAMP) ## build the documentation as a site, into build/docs; check its links
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs \
	    || { rm -rf build/doctrees; exit 1; }
	@echo 'streamrl: open $(CURDIR)/build/docs/index.html'

clean: ## remove both environments and the tools' caches; runs/ stays
	rm -rf .venv $(PARITY) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): setup.cfg requirements/adapters.txt requirements/cpu_overrides.txt scripts/install.py scripts/debian_packages.py
	@for python in $(PYTHON); do \
	    $$python -c '$(FITS)' 2>/dev/null \
	    && exec $$python scripts/install.py --device $(DEVICE) --stamp $@; \
	done; \
	echo 'streamrl: needs Python 3.11 or 3.12 with venv (Debian, Ubuntu: apt install python3-venv);' \
	    'tried $(PYTHON); name another with make PYTHON=...' >&2; \
	exit 1

$(CHROMIUM): scripts/install_chromium.py scripts/debian_packages.py $(STAMP)
	$(BIN)/python scripts/install_chromium.py

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python scripts/install.py --device $(DEVICE) --extra docs --stamp $@

# verl carries its own `tests` and `scripts`, which would be imported instead of ours.
$(PARITY)/installed: requirements/parity.txt $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(PARITY)
	$(BIN)/python -m pip --python $(PARITY) install -qq --no-deps --no-compile -r requirements/parity.txt
	cd $(PARITY)/lib/python3.*/site-packages && rm -r tests scripts \
	    && $(CURDIR)/$(BIN)/python -c 'import site; print(*site.getsitepackages())' > streamrl.pth
	touch $@
