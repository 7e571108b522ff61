# Steptron: `make` lists the targets. `make quickstart` and `make test` each set up everything they need.

ifneq ($(words $(CURDIR)),1)
$(error the path "$(CURDIR)" contains a space, which make cannot handle: move the clone to a path without spaces)
endif

# ------------------------------------------------------------------------------------------ settings
VENV ?= .venv
# Python 3.11 or 3.12; found by tools/preflight.sh when empty.
PYTHON ?=
# Python 3.12 for test-py312; found the same way when empty.
PYTHON312 ?=
TORCH_VERSION ?= 2.13.0
# Where torch comes from when not from pip's default, for example PyTorch's CPU index.
TORCH_INDEX_URL ?=
# 1: use the torch that PYTHON can already import (containers).
KEEP_TORCH ?=
# Megatron-Core: 0.16.1 on Python 3.11, 0.19.2 on 3.12 when empty.
MEGATRON_VERSION ?=
# `make PIP_FLAGS=` shows pip's downloads.
PIP_FLAGS ?= -q
PYTEST_ARGS ?=
# Much of a test with several processes is waiting: two at a time. Files stay together, for the fixtures they share.
PYTEST_PROCESSES ?= -n 2 --dist loadfile --no-loadscope-reorder
QUICKSTART_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=

# ------------------------------------------------------------------------------------------ set-up
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
keep_torch := $(filter-out 0 no false,$(KEEP_TORCH))

# What a set-up was made with is part of the stamps' names, so that another choice is carried out.
checksum = $(firstword $(shell printf '%s' '$(1)' | cksum))
ifdef keep_torch
VENV_STAMP := $(VENV)/.stamp-venv-with-system-packages
TORCH_STAMP := $(VENV)/.stamp-torch-kept
else
VENV_STAMP := $(VENV)/.stamp-venv
TORCH_STAMP := $(VENV)/.stamp-torch-$(TORCH_VERSION)$(if $(TORCH_INDEX_URL),-$(call checksum,$(TORCH_INDEX_URL)))
endif
INSTALL_STAMP := $(VENV)/.stamp-installed$(if $(MEGATRON_VERSION),-$(MEGATRON_VERSION))
NATIVE_STAMP := $(VENV)/.stamp-native
CHECK_NATIVE = $(PY) -P -c 'import sys; from steptron_kernels.extension import why_unavailable as why; sys.exit(why() and "steptron: " + why())'
NATIVE_SOURCES := $(shell find kernels -name '*.cpp' -o -name '*.h') kernels/steptron_kernels/build.py

# --system-site-packages shows the packages of a system Python; those of a virtual environment need their path.
outer_packages := import sys, sysconfig; print(sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else "")

.PHONY: help setup native quickstart curriculum sft test test-py312 lint format bench soak clean distclean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Settings: PYTHON, VENV, TORCH_INDEX_URL, TORCH_VERSION, KEEP_TORCH=1, MEGATRON_VERSION, PIP_FLAGS,"
	@echo "  PYTEST_ARGS='...', QUICKSTART_ARGS='...' (see docs/quickstart.md)"

setup: $(INSTALL_STAMP) $(NATIVE_STAMP) ## make the virtual environment and install everything into it

native: | $(INSTALL_STAMP) ## compile the native CPU kernels again
	@$(PY) setup.py build_ext --inplace
	@$(CHECK_NATIVE) && touch $(NATIVE_STAMP)

$(VENV_STAMP):
	@python=$$(PYTHON='$(PYTHON)' WANT='$(WANT)' SETTING='$(SETTING)' sh tools/preflight.sh) && \
	echo "==> Making the virtual environment $(VENV) with $$python" && \
	"$$python" -m venv --clear $(if $(keep_torch),--system-site-packages) $(VENV) \
	$(if $(keep_torch),&& "$$python" -c '$(outer_packages)' > $$(echo $(VENV)/lib/python3.*/site-packages)/outer.pth)
	@touch $@

$(VENV)/.stamp-torch-kept: $(VENV_STAMP)
	@$(PY) -c 'import torch; print("==> Keeping torch", torch.__version__, "from", torch.__path__[0])' 2>/dev/null || \
	{ echo "steptron: KEEP_TORCH=1, but the chosen Python cannot import torch: leave KEEP_TORCH out, or pass PYTHON=... of the one that has it" >&2; exit 1; }
	@touch $@

$(VENV)/.stamp-torch-$(TORCH_VERSION)%: $(VENV_STAMP)
	@echo "==> Installing torch $(TORCH_VERSION) from $(TORCH_INDEX_URL) (about 0.2 GB to download for a CPU build, 3 GB for CUDA)"
	@$(PIP) install $(PIP_FLAGS) --force-reinstall --index-url '$(TORCH_INDEX_URL)' 'torch==$(TORCH_VERSION)'
	@rm -f $(VENV)/.stamp-torch-* && touch $@ $(VENV)/.stamp-torch-$(TORCH_VERSION)

$(VENV)/.stamp-torch-$(TORCH_VERSION): $(VENV_STAMP)
	@echo "==> Installing torch $(TORCH_VERSION) (with pip's default index a CUDA build, about 3 GB to download; for the 0.2 GB CPU build set TORCH_INDEX_URL, see docs/quickstart.md)"
	@$(PIP) install $(PIP_FLAGS) 'torch==$(TORCH_VERSION)'
	@rm -f $(VENV)/.stamp-torch-* && touch $@

# The constraint keeps the chosen torch: no dependency may replace it. Without build isolation the native CPU kernels are
# compiled against that torch.
$(INSTALL_STAMP): setup.py pyproject.toml | $(TORCH_STAMP)
	@echo "==> Installing Steptron, Megatron-Core and the development tools (about 0.2 GB to download) and compiling the native CPU kernels (two to five minutes together)"
	@$(PY) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(VENV)/constraints.txt
	@megatron='$(MEGATRON_VERSION)'; \
	if [ -z "$$megatron" ]; then \
		megatron=$$($(PY) -c 'import sys; print("0.16.1" if sys.version_info < (3, 12) else "0.19.2")'); \
	fi; \
	$(PIP) install $(PIP_FLAGS) 'setuptools>=77' ninja && \
	$(PIP) install $(PIP_FLAGS) --no-build-isolation -c $(VENV)/constraints.txt "megatron-core==$$megatron" -e '.[dev]'
	@rm -f $(VENV)/.stamp-installed* && touch $@
	@$(CHECK_NATIVE) && touch $(NATIVE_STAMP) || true

$(NATIVE_STAMP): $(NATIVE_SOURCES) | $(INSTALL_STAMP)
	@echo "==> Compiling the native CPU kernels (one to two minutes, 1 GB of memory per core)"
	@$(PY) setup.py -q build_ext --inplace
	@$(CHECK_NATIVE) && touch $@ || true

# ------------------------------------------------------------------------------------------ use
quickstart: setup ## text -> tokenizer -> pre-training of a small model -> generated text, on this machine
	@$(PY) tools/quickstart.py $(QUICKSTART_ARGS)

# Naturally long documents for the stages of mid-training: files of more than 20,000 characters.
CURRICULUM := runs/curriculum
STEPTRON := $(PY) -m steptron
METADATA := --metadata-fields content_type,language,domain,source
curriculum: setup ## all stages of configs/pretrain/tiny-curriculum.yaml: base, annealing, longer context, MTP
	@test -e $(CURRICULUM)/corpus.jsonl || $(STEPTRON) data stdlib-corpus $(CURRICULUM)/corpus.jsonl
	@test -d $(CURRICULUM)/long || $(STEPTRON) data filter $(CURRICULUM)/corpus.jsonl --config configs/data/long-documents.yaml --output $(CURRICULUM)/long
	@test -d $(CURRICULUM)/data || $(STEPTRON) data build $(CURRICULUM)/corpus.jsonl --output $(CURRICULUM)/data --train-tokenizer 4096 $(METADATA)
	@test -d $(CURRICULUM)/mid-data || $(STEPTRON) data build $(CURRICULUM)/long/kept --output $(CURRICULUM)/mid-data --tokenizer $(CURRICULUM)/data $(METADATA)
	@$(STEPTRON) config show configs/pretrain/tiny-curriculum.yaml --plot $(CURRICULUM)/schedule.png | sed -n '/^#/p'
	$(STEPTRON) pretrain configs/pretrain/tiny-curriculum.yaml $(CURRICULUM_ARGS)

SFT := runs/sft
sft: setup ## configs/sft/tiny.yaml: an assistant of what `make curriculum` has trained (which runs first, if it has not)
	@test -d $(CURRICULUM)/train/checkpoints || $(MAKE) --no-print-directory curriculum
	@test -d $(SFT)/conversations || $(STEPTRON) sft stdlib-conversations $(CURRICULUM)/corpus.jsonl $(SFT)/conversations
	@for domain in docs code tools arithmetic; do \
		test -d $(SFT)/data/$$domain || $(STEPTRON) sft build $(SFT)/conversations --domain $$domain \
			--output $(SFT)/data/$$domain --tokenizer $(CURRICULUM)/data --max-tokens 1024 --on-long skip \
			--validation-fraction 0.03 || exit 1; \
	done
	@$(STEPTRON) config show configs/sft/tiny.yaml | sed -n '/^#/p'
	$(STEPTRON) sft configs/sft/tiny.yaml $(SFT_ARGS)

test: setup ## run the test suite; installs Chromium and PostgreSQL's server where they are missing
	@sh tools/chromium_for_tests.sh >/dev/null && sh tools/postgres_for_tests.sh install
	$(PY) -m pytest $(PYTEST_PROCESSES) $(PYTEST_ARGS)

test-py312: ## the quickstart's smoke test and some layouts with Python 3.12 and Megatron-Core 0.19.2, in .venv312
	@$(MAKE) --no-print-directory setup VENV=.venv312 PYTHON='$(PYTHON312)' WANT=3.12 SETTING=PYTHON312
	.venv312/bin/python -m pytest -m py312 $(PYTEST_PROCESSES) $(PYTEST_ARGS)

lint: setup ## ruff (rules and formatting), mypy and ShellCheck
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/shellcheck -x tools/*.sh tools/slurm/*.sh tools/slurm/*.sbatch

format: setup ## let ruff format the code and mend what it can
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

bench: setup ## the training step beside other implementations, on this machine
	$(PY) -m benchmarks.train_step $(BENCH_ARGS)

soak: setup ## longer studies, hours: kills at random moments; Muon against AdamW at equal tokens; the report's blow-up
	@$(PY) tools/quickstart.py --steps 1 --folder runs/soak
	$(PY) tools/kill_storm.py runs/soak/data --folder runs/soak/kills
	$(PY) -m tools.metrics_kill_storm
	$(PY) -m benchmarks.muon_against_adamw runs/soak/data --folder runs/soak/muon_against_adamw --plot runs/soak/muon_against_adamw.png $(SOAK_ARGS)
	$(PY) -m tools.reproduce.blowup --folder runs/soak/blowup
	$(PY) -m tools.reproduce.needle --folder runs/soak/needle

clean: ## remove caches and build products; keeps the virtual environments and runs/
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find steptron kernels tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environments too
	rm -rf .venv .venv312
