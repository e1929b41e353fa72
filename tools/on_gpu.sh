#!/bin/bash
# Sets the project up on a bare machine with an NVIDIA GPU, then runs the tests and benchmarks that use the GPU.
# It needs no network: packages come from a folder of wheels.
#
#   tools/on_gpu.sh [setup|test|bench|all] [arguments of pytest]
#
# PYTHON   a Python with a CUDA build of torch; default: .venv/bin/python, or python3
# WHEELS   wheels of what else is needed, for that Python; default: build/gpu_wheels
# RESULTS  where the results of the benchmarks go, as JSON; default: build/gpu_results
# COMMIT   the commit of this tree, where .git is absent
#
# Prints the commit first and a summary last; exits with 1 if a step failed. Benchmarks run also if tests failed.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}
shift $(($# > 0))
case $what in
  setup | test | bench | all) ;;
  *) echo "usage: tools/on_gpu.sh [setup|test|bench|all] [arguments of pytest]" >&2; exit 2 ;;
esac
default=.venv/bin/python
[ -x "$default" ] || default=python3
python=${PYTHON:-$default}
wheels=${WHEELS:-build/gpu_wheels}
results=${RESULTS:-build/gpu_results}
export PATH="$(dirname "$(command -v "$python")"):$PATH"  # ninja and cmake may be next to it

commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
changed=$(git status --porcelain --untracked-files=no 2>/dev/null | wc -l)
echo "commit $commit$([ "$changed" -eq 0 ] || echo ", and $changed changed files")"

summary=()
failed=0
step() {  # a name, then a command
  local name=$1 began=$SECONDS
  shift
  if "$@"; then summary+=("ok      $name ($((SECONDS - began)) s)"); else
    summary+=("FAILED  $name ($((SECONDS - began)) s): $*")
    failed=1
  fi
}

gpu() {
  "$python" -c '
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no CUDA device; PYTHON must name a Python with a CUDA build of torch")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
from importlib.util import find_spec
if find_spec("pyarrow") is None:
    print("pyarrow is not installed: the tests of ranks and parameter servers will be skipped")'
}

setup() {
  local found=("$wheels"/*.whl)
  if [ -e "${found[0]}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps "${found[@]}" || return 1
  fi
  "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps -e .
}

bench() {  # the name of a benchmark, and its options
  mkdir -p "$results"
  "$python" -m monolith bench "$@" --device cuda --json > "$results/$1.json"
}

run_tests() {
  "$python" -m pytest --gpu -q -n "$(nproc)" -m 'not soak' "$@"
}

step "GPU" gpu
[[ $failed == 1 || $what == test || $what == bench ]] || step "setup" setup
if [ "$failed" -eq 0 ]; then
  [[ $what == setup || $what == bench ]] || step "tests" run_tests "$@"
  if [[ $what == bench || $what == all ]]; then
    for name in table train attention; do step "bench $name" bench "$name"; done
    step "bench run" bench run --records 400000 --seconds 5 --repeats 1
    step "bench stream" bench stream --scale 1
  fi
fi
echo
echo "commit $commit"
printf '%s\n' "${summary[@]}"
exit $failed
