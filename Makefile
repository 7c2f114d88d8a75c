# `make demo`, `make test`, `make docs` and `make wheel` do everything on a machine that has only python3 (3.10 to 3.13).
# They build .venv first; stamp files keep later runs quick.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet
STAMP  := $(VENV)/.stamps

# Oldest to newest minor release that register.py knows; the newest is the one .venv itself holds.
FRONTENDS_BESIDE := 1.30.0 1.31.0
FRONTEND_STAMPS  := $(FRONTENDS_BESIDE:%=$(STAMP)/frontend-%)

.PHONY: demo test lint format planning host docs wheel fuzz verification clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo    one attention layer on real text through cudnn.pygraph and this engine"
	@echo "make test    lint, types, host tests, planning against every supported cudnn-frontend, samples"
	@echo "make docs    the documentation, strictly, into .site/"
	@echo "make wheel   build the wheel, install it into an empty environment, run its samples"
	@echo "make lint    ruff and mypy only        make format   let ruff rewrite"
	@echo "make fuzz    N random graphs on a GPU against the oracle (N=2000)"
	@echo "make verification    all GPU tests, sanitizers and the fuzzer; writes docs/verification.md"

demo: $(STAMP)/installed
	$(BIN)/python samples/01_graph_api.py

test: lint planning host

lint: $(STAMP)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The other releases of cudnn-frontend lie beside .venv's own and go first on the path.
planning: $(STAMP)/installed $(FRONTEND_STAMPS)
	@set -e; for version in $(FRONTENDS_BESIDE); do \
	    echo "== planning against cudnn-frontend $$version"; \
	    export PYTHONPATH=$(CURDIR)/$(VENV)/frontends/$$version; \
	    $(BIN)/python -c "import cudnn; assert cudnn.__version__ == '$$version', cudnn.__file__"; \
	    $(BIN)/python -m pytest -q -m planning tests/host; \
	done

# Everything without a GPU, on .venv's own cudnn-frontend: planning, docs/support.md and the samples are among these.
# tests/gpu is collected so that it cannot rot, and skips itself where there is no GPU.
host: $(STAMP)/installed
	$(BIN)/python -m pytest -q tests

docs: $(STAMP)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(STAMP)/installed
	$(BIN)/python -m tests.wheel

N ?= 2000
fuzz: $(STAMP)/installed
	$(BIN)/python -m tests.gpu.fuzz $(N)

verification: $(STAMP)/installed
	$(BIN)/python -m pytest -q tests/gpu --verification-report docs/verification.md
	$(BIN)/python -m tests.gpu.sanitize --append docs/verification.md
	$(BIN)/python -m tests.gpu.fuzz $(N) --append docs/verification.md

$(STAMP)/venv:
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMP)
	touch $@

# torch by itself and first, so that pip takes the build a machine prefers for exactly this version.
$(STAMP)/torch: $(STAMP)/venv constraints.txt
	$(PIP) torch==2.13.0
	touch $@

$(STAMP)/installed: $(STAMP)/torch pyproject.toml constraints.txt cudnn_frost_sm120.pth
	$(PIP) -c constraints.txt -e '.[test,plots]'
	touch $@

$(STAMP)/docs: $(STAMP)/installed
	$(PIP) -c constraints.txt -e '.[docs]'
	touch $@

$(STAMP)/frontend-%: $(STAMP)/venv
	$(PIP) --no-deps --upgrade --target $(VENV)/frontends/$* nvidia-cudnn-frontend==$*
	touch $@

clean:
	rm -rf $(VENV)
