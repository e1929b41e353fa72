#!/bin/bash
# Tests tables on a GPU, and that every program of kernels compiles there: one command, under four minutes.
# Run it in the root of an installed checkout on a machine with an NVIDIA GPU and a CUDA build of torch.
set -eu
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device; see monolith doctor"'
"$python" -m pytest -q -x -n 4 -m 'not soak' \
  tests/cuda tests/table/cuda/test_structs.py tests/table/cuda/test_memory.py tests/table/cuda/test_snapshots.py
"$python" -m pytest -q -x -n 4 -m 'not soak' -k 'CudaTable or gpu' \
  tests/table/cuda tests/contracts/test_table.py tests/contracts/test_table_snapshot.py tests/contracts/test_lazy_decay.py
