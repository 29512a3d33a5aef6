# Two commands do all the set-up on a fresh machine with Python (3.11 or newer) and pip:
#   make demo   a fleet on this machine, one streamed completion, the smoke ladder, and down again
#   make test   every test; `make check` is the quick part of it
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
KV     := $(BIN)/kvdeploy
# Ansible's programs look for each other on PATH, and keep their files out of the home folder.
ANSIBLE := PATH="$(abspath $(BIN)):$$PATH" ANSIBLE_HOME=$(abspath $(VENV))/ansible

.PHONY: demo test check lint types unit infra scan hosts hosts-base molecule e2e rehearsed rehearsal \
  bench bench-aws bench-faults bench-h200x2 bench-nodes bench-rehearsal bench-router clean

demo: $(VENV)/.installed
	$(KV) doctor
	@# Whatever happens from here on, what was started is stopped.
	@trap '$(KV) down' EXIT; set -ex; \
	  $(KV) up; \
	  $(BIN)/python examples/stream.py 'The harbour lights went out one by one'; \
	  $(KV) smoke

test: check infra scan hosts molecule e2e rehearsed

check: lint types unit

lint: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict examples
	$(BIN)/yamllint --strict --config-file playbooks/.yamllint playbooks tests/playbooks images
	cd playbooks && $(ANSIBLE) ansible-lint --offline
	cd playbooks && $(ANSIBLE) ansible-lint --offline ../images/reach.yml ../images/seal.yml

types: $(VENV)/.developing
	$(BIN)/mypy
	@# Roles' programs stand alone on a node; several have the same name.
	find playbooks -name '*.py' -print0 | xargs -0 -n 1 $(BIN)/mypy --scripts-are-modules

unit: $(VENV)/.developing
	$(BIN)/python -m pytest tests --ignore tests/e2e --ignore tests/infra --ignore tests/playbooks --ignore tests/rehearsal \
	  --numprocesses 2 --dist worksteal

# The real terraform and AWS provider against doubles of AWS, three at a time: they wait more than they
# work. Where they are not installed the tests are skipped, and say so.
infra: $(VENV)/.developing
	$(BIN)/python -m pytest tests/infra --numprocesses 3 --dist worksteal --durations=0

# checkov has a hundred packages of its own: they get their own environment.
scan: $(VENV)-scan/.installed
	$(VENV)-scan/bin/checkov --directory infra --framework terraform --skip-download --quiet --compact

# Playbooks on hosts with a real systemd, which are made here: wants root and Debian's systemd-container,
# mmdebstrap, dpkg-dev, gnupg and iproute2. Without them the tests are skipped, and say so.
hosts-base: $(VENV)/.developing
	$(BIN)/python -m tests.hostlab bootstrap

hosts: $(VENV)/.developing
	$(BIN)/python -m pytest tests/playbooks --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=0

# Two scenarios at a time, each on hosts of its own.
molecule: $(VENV)/.developing
	cd tests/playbooks && ls molecule/*/molecule.yml | cut -d / -f 2 | \
	  $(ANSIBLE) xargs -P 2 -I @ molecule test --scenario-name @

# Real vLLM engines on this machine. The first run builds their runtime (2 GB).
e2e: $(VENV)/.developing
	$(BIN)/python -m pytest tests/e2e --durations=0

# The whole path of `target: aws` on hosts that are made here: wants what `hosts` and `infra` want.
rehearsed: $(VENV)/.developing
	$(BIN)/python -m pytest tests/rehearsal --durations=0

# The same to look at: up, status, smoke, down. `python -m tests.rehearsal` keeps one for as long as you like.
rehearsal: $(VENV)/.developing
	$(BIN)/python -m tests.rehearsal run --root $(abspath rehearsal) $(YES)

bench: $(VENV)/.developing
	$(BIN)/python benchmarks/first_light.py

bench-aws: $(VENV)/.developing
	$(BIN)/python -m benchmarks.aws

# Real engines, as root each in a network namespace of its own; --only ROW for a part of it.
bench-faults: $(VENV)/.developing
	$(BIN)/python -m benchmarks.router_faults

# On a host with one or two GPUs; H200X2='--small --folder DIR' shows on CPUs that it runs.
bench-h200x2: $(VENV)/.developing
	$(BIN)/python -m benchmarks.h200x2 $(H200X2)

bench-nodes: $(VENV)/.developing
	$(BIN)/python -m benchmarks.nodes

# VLLM_ROUTER=PROGRAM adds vllm-router, from an environment of its own, to the comparison.
bench-router: $(VENV)/.developing
	$(BIN)/python -m benchmarks.router_speed --pin $(if $(VLLM_ROUTER),--vllm-router $(VLLM_ROUTER))

bench-rehearsal: $(VENV)/.developing
	$(BIN)/python -m benchmarks.rehearsal times
	$(BIN)/python -m benchmarks.rehearsal early
	$(BIN)/python -m benchmarks.rehearsal changes late
	$(BIN)/python -m benchmarks.rehearsal times 2 3
	$(BIN)/python -m benchmarks.rehearsal image

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("kvdeploy needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.developing: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)-scan/.installed:
	$(PYTHON) -m venv $(VENV)-scan
	$(VENV)-scan/bin/python -m pip install --quiet 'checkov>=3.2'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-scan .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
