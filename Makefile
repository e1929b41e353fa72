# Everything runs from a bare clone with Python 3.11+, a C++ compiler and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(shell find native/src native/bindings src/monolith/native/include -type f)
CXX_FILES = $(shell find native src/monolith -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# cmake, ninja and ctest of the system where it has them, of the virtual environment where not.
export PATH := $(PATH):$(CURDIR)/$(BIN)

.DEFAULT_GOAL := help
.PHONY: help setup demo test retest check docs services wheels image bench gpu soak soak-python fuzz clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## Create .venv and install the project with its tools

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# The constraints name the torch we test with. Where an index has a CPU build of it, install that one first: the
# usual one brings some 3 GB of CUDA packages, which work and are not needed.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(CORE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt --upgrade pip
	PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## Train, serve and follow a live stream, and watch it
	$(BIN)/monolith demo

# Four workers for two cores, since tests also wait for servers and deadlines; each computes with one thread, or
# threads would wait for each other busily. Python keeps what it compiles of the tests, and their folders are in
# memory where there is some to be had.
test: export OMP_NUM_THREADS = 1
test: export PYTHONDONTWRITEBYTECODE =
test: export PYTEST_DEBUG_TEMPROOT = $(wildcard /dev/shm)
test: setup native-tests  ## The tests, without the slow ones
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m 'not soak'

retest: export OMP_NUM_THREADS = 1
retest: setup  ## The tests that failed in the last run, by themselves; at most three
	$(BIN)/python tools/retest.py

# The C++ tests, in a build of their own that later runs only bring up to date: about two minutes at first on two
# cores, seconds after that.
CPP := build/native-tests
.PHONY: native-tests tidy
native-tests: setup
	cmake -S . -B $(CPP) -G Ninja -DMONOLITH_TESTS=ON > /dev/null
	cmake --build $(CPP)
	ctest --test-dir $(CPP) -j 2 --output-on-failure

# clang-tidy reads how each file is compiled from the same folder; nothing need be built. -w: g++ is the compiler
# whose warnings count.
tidy: setup
	cmake -S . -B $(CPP) -G Ninja -DMONOLITH_TESTS=ON > /dev/null
	ls native/src/*.cc | xargs -P 2 -n 4 $(BIN)/clang-tidy -p $(CPP) --quiet --extra-arg=-w

check: setup tidy  ## Lint, format, types, imports, names, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_files.py
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/check_words.py

docs: setup  ## The documentation as a site, in build/site
	$(BIN)/python tools/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

services: setup  ## Install the servers that the tests talk to
	tools/services.sh

# One for the machine it is built on: the same command on an x86 machine makes the one for x86. The core is built
# here, so the wheel runs where the C library is as new as this one's.
WHEELS ?= dist
wheels: | $(BIN)/python  ## A wheel for this kind of machine, in dist
	PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip wheel --no-deps --wheel-dir $(WHEELS) .

image:  ## The Docker image: monolith, and nothing else that is ours
	docker build -t monolith .

bench: setup  ## Measure the table against the machine's limits, and training against torch
	$(BIN)/monolith bench table
	$(BIN)/monolith bench train

gpu:  ## Set up, test and measure on a machine with an NVIDIA GPU, without a network
	tools/on_gpu.sh all

soak: soak-plain soak-thread soak-address,undefined fuzz soak-python simulate  ## Sanitizers, fuzzing, kills: all that is slow; -j2 for less time
	@echo "make soak: C++ tests plain and under sanitizers, fuzzing, slow Python tests and simulations have all passed"

soak-python: setup
	$(BIN)/python -m pytest -n 2 --dist load -m soak --durations=15 -rA
	$(BIN)/python -m pytest -n 2 --dist load -m 'hypothesis and not soak' --hypothesis-profile=thorough

# Goes on from the last seed, and runs those that failed first: build/simulation.json.
RUNS ?= 100000
simulate: setup  ## Simulated clusters with faults: 100,000 runs, or RUNS
	cd tests && $(CURDIR)/$(BIN)/python -m simulation.sweep --runs $(RUNS)

soak-%: setup
	cmake -S . -B build/$@ -G Ninja -DMONOLITH_TESTS=ON -DMONOLITH_SANITIZE=$(filter-out plain,$*)
	cmake --build build/$@
	ctest --test-dir build/$@ --output-on-failure

# The code under test is compiled with the hook that guides the loop, the loop itself is not.
FUZZ_SECONDS ?= 600
FUZZED := $(addprefix $(CURDIR)/native/src/,example_parser.cc example_writer.cc csv_parser.cc entry_dump.cc frames.cc tfrecord.cc checksum.cc workers.cc)
FUZZ_FLAGS := -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -I$(CURDIR)/native/src -I$(CURDIR)/src/monolith/native/include

fuzz: setup  ## Damaged records, files and messages for every parser and port: ten minutes, or FUZZ_SECONDS
	mkdir -p build/fuzz
	cd build/fuzz && g++ $(FUZZ_FLAGS) -fsanitize-coverage=trace-pc -c $(FUZZED)
	cd build/fuzz && g++ $(FUZZ_FLAGS) -O2 $(CURDIR)/native/tests/fuzz_example_parser.cc $(notdir $(FUZZED:.cc=.o)) -pthread -o fuzz_example_parser
	# All at once. A crash of a parser leaves its input in build/fuzz/last_input; the others say a seed.
	cd build/fuzz && ./fuzz_example_parser $(FUZZ_SECONDS) & parsers=$$!; \
	cd tests; ../$(BIN)/python -m faults.file_fuzzer --seconds $(FUZZ_SECONDS) & files=$$!; \
	../$(BIN)/python -m faults.port_fuzzer --seconds $(FUZZ_SECONDS) --keep ../build/fuzz/ports; ports=$$?; \
	wait $$parsers && wait $$files && exit $$ports

clean:  ## Remove what was built; .venv stays
	rm -rf build dist $(STAMP) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
