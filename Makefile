# `make demo` and `make test` do everything on a fresh Debian or Ubuntu machine with Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= demo
SHELL = /bin/bash
.SHELLFLAGS = -eu -o pipefail -c
.PHONY: demo test test-slurm check system clean

# What Blender's Python module loads: file names for ldconfig, Debian's package names for apt-get.
SHARED_OBJECTS = libX11.so.6 libXrender.so.1 libXfixes.so.3 libXi.so.6 libxkbcommon.so.0 libSM.so.6 libICE.so.6 libGL.so.1
LIBRARIES = libx11-6 libxrender1 libxfixes3 libxi6 libxkbcommon0 libsm6 libice6 libgl1
SLURM = slurm-wlm munge

demo: $(VENV)/.demo
	$(BIN)/ident3d render $(OUT)/64px --samples 256 --resolution 64
	$(BIN)/ident3d render $(OUT)/224px --samples 8 --resolution 224
	$(BIN)/ident3d verify $(OUT)/64px
	$(BIN)/ident3d verify $(OUT)/224px
	$(BIN)/python docs/examples/dataloader.py $(OUT)/64px
	$(BIN)/ident3d render $(OUT)/pairs --samples 32 --resolution 64 --pairs "laplace(scale=0.05)"
	$(BIN)/ident3d pairs $(OUT)/pairs --out $(OUT)/pairs-rendered
	$(BIN)/ident3d pairs $(OUT)/64px --conditional "laplace(scale=0.05)" --out $(OUT)/pairs-matched
	@echo "The pictures to look at:"
	$(BIN)/ident3d figure contact $(OUT)/64px $(OUT)/contact-64px.png
	$(BIN)/ident3d figure contact $(OUT)/224px $(OUT)/contact-224px.png --rows 2 --columns 4
	$(BIN)/ident3d figure traversal $(OUT)/traversal.png
	@echo "A demonstration of contrastive training, on a few pictures for a minute; see results/ for real ones:"
	$(BIN)/ident3d render $(OUT)/64px --split test --samples 128 --resolution 64
	$(BIN)/ident3d-baselines 3dident --data $(OUT)/64px --preset quick --factors object_x object_y object_z \
	  --batch 64 --steps 60 --evaluate-every 20 --out $(OUT)/encoder

test: $(VENV)/.test check
	$(BIN)/python -m pytest

# On a Slurm of one node, which the tests start in a temporary folder and end. Without one they are skipped.
test-slurm: $(VENV)/.test
	@if PATH="$$PATH:/usr/sbin" command -v slurmctld > /dev/null && PATH="$$PATH:/usr/sbin" command -v munged > /dev/null; \
	then exit 0; fi; \
	if ! command -v apt-get > /dev/null; then echo "skipped: slurmctld and munged are absent, and so is apt-get"; \
	elif [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -yq $(SLURM); \
	elif sudo -n true 2>/dev/null; then sudo apt-get update -q && sudo apt-get install -yq $(SLURM); \
	else echo "skipped: slurmctld and munged are absent; as root: apt-get install $(SLURM)"; fi
	$(BIN)/python -m pytest -m slurm tests/slurm

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks docs/examples

system:
	@missing=$$(for so in $(SHARED_OBJECTS); do ldconfig -p | grep -qF "$$so " || echo "$$so"; done); \
	[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	echo "absent:" $$missing; \
	packages="$(LIBRARIES) python3 python3-venv"; \
	if [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -yq $$packages; \
	elif sudo -n true 2>/dev/null; then sudo apt-get update -q && sudo apt-get install -yq $$packages; \
	else echo "as root: apt-get install $$packages"; exit 1; fi

$(BIN)/python: | system
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(VENV)/.demo: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q -e '.[render,baselines]'
	touch $@

$(VENV)/.test: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q -e '.[render,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
