# Everything here works from a fresh clone with git, make, python3 >= 3.11 and its venv module.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup data train test test-all lint format bench demo ui defaults clean distclean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
DATA := datasets/trees
PORT ?= 5000
ARGS ?=
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make the environment in .venv

# ultralytics asks for opencv-python (which needs libGL), albumentations for opencv-python-headless; both
# own the same files, so both go and the headless one comes back.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) has no venv module; apt install python3-venv" >&2; exit 2; }
	@echo "setup: installing into $(VENV), some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(PIP) uninstall --yes opencv-python opencv-python-headless
	@$(PIP) install --no-deps -c constraints.txt opencv-python-headless
	@touch $@

data: setup ## fetch the tree-crown photos into datasets/trees
	@test -f $(DATA)/data.yaml || $(BIN)/python -m pipelines.fetch --out $(DATA)

train: data ## train on them with two CPU workers (ARGS="epochs=10 ..." changes options)
	@$(BIN)/python -m pipelines.train configs/trees.yaml $(ARGS)

test: setup ## run the tests
	@$(BIN)/python -m pytest -q $(ARGS)

test-all: setup ## run the slow tests too
	@$(BIN)/python -m pytest -q -m "not gpu"

lint: setup ## ruff and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: setup ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## time the training step
	@$(BIN)/python -m pipelines.benchmark $(ARGS)

demo: data ## from training to a champion in MLflow's registry, as Ray jobs on this machine (runs/demo)
	@$(BIN)/python -m demos.release --data $(DATA)/data.yaml $(ARGS)

ui: setup ## show the runs in MLflow, http://127.0.0.1:5000 (PORT=...)
	@mkdir -p runs
	@$(BIN)/mlflow ui --host 127.0.0.1 --port $(PORT) --backend-store-uri sqlite:///$(CURDIR)/runs/mlflow.db

defaults: setup ## rewrite configs/default.yaml from the schema
	@$(BIN)/python -c 'from yolo_ray.config.load import default_yaml; print(default_yaml(), end="")' > configs/.default.tmp
	@mv configs/.default.tmp configs/default.yaml

clean: ## remove caches; runs, data and environment stay
	@rm -rf .pytest_cache .ruff_cache build *.egg-info
	@find yolo_ray pipelines tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment and the fetched photos too; runs stay
	@rm -rf $(VENV) $(DATA)
