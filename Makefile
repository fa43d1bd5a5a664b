# Bough: `make run` and `make test` are all a fresh machine needs. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 50051
MODEL ?= local
ONCE ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
WEIGHTS := $(VENV)/.weights
STUBS := clients/python

.DEFAULT_GOAL := help
.PHONY: help venv run test check fmt proto proto-diff bench bench-docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

venv: $(STAMP) ## the virtual environment, made once and again when pyproject.toml changes

proto: $(STAMP) ## the generated stubs, made again (offline)
	@rm -rf $(STUBS)/buf $(STUBS)/bough/v1/*_pb2*
	@$(BIN)/python -m grpc_tools.protoc -Iproto/vendor -Iproto --python_out=$(STUBS) --mypy_out=quiet:$(STUBS) \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy $$(cd proto && ls bough/v1/*.proto) buf/validate/validate.proto
	@$(BIN)/python -m grpc_tools.protoc -Iproto/vendor -Iproto --grpc_python_out=$(STUBS) --mypy_grpc_out=quiet:$(STUBS) \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc $$(cd proto && ls bough/v1/*_service.proto)
