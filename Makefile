# make demo: train, evaluate, export and query a small pre-activation ResNet. make test: the tests. make help: the rest.
PYTHON ?= python3
VENV ?= .venv
BACKEND ?= tensorflow
RUNS ?= runs
SAVED_MODELS ?= saved_models
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo cifar demo-run test test-all test-processes soak soak-on test-lowest mutants lint pages docs build clean
bin := $(VENV)/bin

# PyPI's torch for Linux brings gigabytes of CUDA. Without a GPU, take the CPU build from PyTorch's own index, unless pip is
# configured to look elsewhere.
ifeq ($(shell command -v nvidia-smi)$(PIP_FIND_LINKS)$(PIP_EXTRA_INDEX_URL)$(PIP_INDEX_URL),)
torch_url := https://download.pytorch.org/whl/cpu
torch_index := --extra-index-url $(torch_url)
endif
# Tests of the paper's definitions, the networks, their files and the optimisers.
core_tests := $(addprefix tests/keras_preact/test_,$(addsuffix .py,unit_reference identity_mappings parameter_counts import \
  initializers losses optimizers schedules))
about_training := TensorFlow (CPU), Keras and the packages of the command line
about_test := pytest, TensorFlow, JAX (CPU), PyTorch, servers, other runtimes, ruff and mypy
about_docs := MkDocs with its theme, a notebook kernel and packages for the pictures

# Python compiles a module when it imports it first. To compile all of them would take a minute.
install = -m pip install --no-compile --progress-bar off --disable-pip-version-check

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) BACKEND=$(BACKEND) (tensorflow, jax, torch) PYTEST_ARGS=$(PYTEST_ARGS)"

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version). Name another: make PYTHON=python3.12 ..."; \
	  exit 2; }
	@echo "Creating a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints/tested.txt | $(bin)/python
	@echo "Installing into $(VENV), with the versions of constraints/tested.txt: $(about_$*)"
	@$(bin)/python $(install) -c constraints/tested.txt -e '.[$*]' | sed -n 's/^Successfully installed/Installed:/p'
	@touch $@

demo: $(VENV)/.installed-training ## Train on digits, evaluate, export to saved_models/digits, classify images. About 2 minutes.
	@$(MAKE) --no-print-directory demo-run

cifar: $(VENV)/.installed-training ## The same on CIFAR-10, with the recipe cifar10_fast and TRAIN_ARGS.
	@$(MAKE) --no-print-directory demo-run RECIPE=cifar10_fast NETWORK="a wide, shallow pre-activation network on CIFAR-10" \
	  EXPORTED=cifar10 VIEWS=flip_shift

RECIPE := digits
NETWORK := a pre-activation ResNet-20 on handwritten digits
EXPORTED := digits
TRAIN_ARGS ?=
VIEWS :=
demo-run:
	@run=$(RUNS)/$(EXPORTED)-$$(date +%Y%m%d-%H%M%S); \
	step() { echo; echo "== $$1"; shift; echo "\$$ keras-preact $$*"; $(bin)/keras-preact "$$@"; }; \
	step "1 of 4: train $(NETWORK)" train $(RECIPE) --output $$run $(TRAIN_ARGS); \
	step "2 of 4: measure its accuracy on the test images" evaluate $$run --save-samples 10; \
	[ -z "$(VIEWS)" ] || step "2 of 4: the same with 6 views of each image" evaluate $$run --views $(VIEWS) --output $$run/views; \
	step "3 of 4: export it as a SavedModel" export $$run --name $(EXPORTED) --output $(SAVED_MODELS); \
	step "4 of 4: classify images with the SavedModel, by TensorFlow alone" predict --top 1 $(SAVED_MODELS)/$(EXPORTED) $$run/samples/*.png; \
	echo; echo "Results: the run in $$run with its curves.png, the SavedModel in $(SAVED_MODELS)/$(EXPORTED)."; \
	echo "Next: source $(VENV)/bin/activate, then keras-preact --help"

tests := $(VENV)/.installed-tests
# Two workers on every machine: each needs up to 6 GiB. The tests of a file stay together, because they share what is slow to make.
# The files are in the order of tests/conftest.py.
pytest = KERAS_BACKEND=$(BACKEND) OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 $(bin)/python -m pytest -n 2 --dist loadfile \
  --no-loadscope-reorder

test: $(tests) ## Run the tests on BACKEND; on jax and torch, those that depend on it. About 10 minutes on 2 cores.
	$(pytest) -m "not process and not soak" $(PYTEST_ARGS)

test-all: $(tests) ## Run what `make test` and `make test-processes` run, together.
	$(pytest) -m "not soak" $(PYTEST_ARGS)

test-processes: $(tests) ## Run the commands as a user does: train, kill and resume, export, serve.
	$(pytest) -m "process and not soak" $(PYTEST_ARGS)

soak: $(tests) ## Run the tests that are slow and rarely fail: full depth, full products, random networks and runs, many kills, packages, documents. Up to an hour on 2 cores.
	for backend in tensorflow jax torch; do $(MAKE) --no-print-directory soak-on BACKEND=$$backend; done

soak-on: $(tests)
	$(if $(torch_url),PIP_EXTRA_INDEX_URL=$(torch_url)) $(pytest) -m soak --timeout 3600 $(PYTEST_ARGS)

mutants: $(tests) ## Break the code in many places, one at a time: a test must fail for each.
	$(bin)/python tests/mutants

# All backends in one environment: tests compare them. Tests also compare the networks of timm and pytorchcv with ours. These do not
# use torchvision, which fails with some builds of torch.
$(tests): pyproject.toml constraints/tested.txt | $(bin)/python
	@echo "Installing into $(VENV), with the versions of constraints/tested.txt: $(about_test)"
	@$(bin)/python $(install) -c constraints/tested.txt \
	  $(torch_index) -e '.[test,jax,torch,lint]' | sed -n 's/^Successfully installed/Installed:/p'
	@$(bin)/python $(install) -c constraints/tested.txt --no-deps timm pytorchcv | \
	  sed -n 's/^Successfully installed/Installed:/p'
	@touch $@

test-lowest: $(VENV)-lowest/.installed ## Run the core tests on every backend, with the oldest versions that pyproject.toml allows.
	@for backend in tensorflow jax torch; do \
	  echo "== $$backend, with the versions of constraints/lowest.txt"; \
	  KERAS_BACKEND=$$backend OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -m "not soak" $(core_tests) $(PYTEST_ARGS); \
	done

# No option -c constraints/tested.txt here: its versions are the newest.
$(VENV)-lowest/.installed: pyproject.toml constraints/lowest.txt
	@echo "Creating $(VENV)-lowest, with the versions of constraints/lowest.txt: TensorFlow, JAX (CPU), PyTorch and pytest"
	@$(PYTHON) -m venv $(VENV)-lowest
	@$(VENV)-lowest/bin/python $(install) -c constraints/lowest.txt \
	  $(torch_index) -e '.[jax,torch]' pytest | sed -n 's/^Successfully installed/Installed:/p'
	@touch $@

lint: $(tests) ## Check style, types, and that every mutant applies.
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/python tests/mutants --list > /dev/null

pages: $(VENV)/.installed-docs ## Write the tables, numbers and pictures of the documentation into docs/.
	$(bin)/python docs/hooks/tables.py
	$(bin)/python docs/hooks/pictures.py

docs: $(VENV)/.installed-docs ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict

build: $(tests) ## Write the wheel and the source distribution to dist/.
	$(bin)/python -m build

clean: ## Remove the virtual environments and caches; runs and exported models stay.
	rm -rf $(VENV) $(VENV)-lowest build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
