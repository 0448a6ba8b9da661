# Everything that this project needs is installed by these targets, into .venv; nothing by hand.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEMO := .demo/qwen-moe
DEMO_SIZE ?= 512MiB

.DEFAULT_GOAL := help
.PHONY: help install test lint types demo figures clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

install: $(INSTALLED) ## a virtual environment in .venv with everything

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	touch $@

test: lint types ## the whole suite, as continuous integration runs it
	$(BIN)/pytest -q -n 2 --dist loadfile

lint: $(INSTALLED) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy --strict
	$(BIN)/mypy

demo: $(INSTALLED) ## a mixture-of-experts checkpoint into 4 ranks, as torch does it by default and with loadmaster
	$(BIN)/loadmaster bench make-checkpoint $(DEMO) --family qwen-moe --size $(DEMO_SIZE)
	$(BIN)/loadmaster bench load $(DEMO) --ranks 4 --arms torch-default,loadmaster --repeat 3 --verify

figures: $(INSTALLED) ## the figures of the README, measured here (about 20 minutes)
	$(BIN)/loadmaster bench make-checkpoint .demo/figures --family llama --size 1700MiB
	$(BIN)/loadmaster bench load .demo/figures --ranks 1
	$(BIN)/loadmaster bench load .demo/figures --ranks 2
	$(BIN)/loadmaster bench load .demo/figures --ranks 4
	$(BIN)/loadmaster bench scope
	$(BIN)/loadmaster bench lease .demo/figures --repeat 3
	$(BIN)/loadmaster bench make-checkpoint .demo/experts --family nvfp4-moe --size 2GiB
	$(BIN)/loadmaster bench experts .demo/experts --ranks 2 --experts-by blocks
	$(BIN)/loadmaster bench make-checkpoint .demo/gpt-oss --family gpt-oss --size 1GiB
	$(BIN)/loadmaster bench experts .demo/gpt-oss --ranks 1 --arms loadmaster,cat-after
	$(BIN)/loadmaster bench make-checkpoint .demo/small-experts --family small-experts --size 1600MiB
	$(BIN)/loadmaster bench experts .demo/small-experts --ranks 1 --arms loadmaster
	$(BIN)/loadmaster bench fetch .demo/figures
	$(BIN)/loadmaster bench make-checkpoint .demo/small --family small-tensors --tensors 100000
	$(BIN)/loadmaster bench load .demo/small --ranks 1 --arms loadmaster

clean: ## remove what make made
	rm -rf .venv .demo build src/*.egg-info
