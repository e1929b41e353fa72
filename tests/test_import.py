"""Importing defines names and does nothing else: seen from outside, in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import monolith

PROJECT = Path(__file__).parents[1]

WATCH = """
import gc, json, logging, os, random, signal, socket, sys, threading, time, warnings

sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)

def state():
    root = logging.getLogger()
    numbers = sorted(signal.valid_signals())
    seen = {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "signals": [str(signal.getsignal(number)) for number in numbers],
        "root logger": [root.level, len(root.handlers), logging.root.manager.disable],
        "environment": dict(os.environ),
        "random": hash(random.getstate()),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "sockets": list(sockets),
        "warnings": len(warnings.filters),
    }
    if "torch" in sys.modules:
        import torch
        seen["torch seed"] = torch.initial_seed()
        seen["torch threads"] = torch.get_num_threads()
    return seen
"""


def run(program: str) -> Any:
    """Run a program after WATCH in a process of its own; return the JSON it prints."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH + program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_package_is_quick_and_leaves_the_process_as_it_was() -> None:
    seen = run("""
STANDARD = ("importlib.resources", "importlib.metadata", "tempfile", "email", "inspect")
STANDARD = [name for name in STANDARD if name not in sys.modules]  # what starts Python may have loaded some
before = state()
start = time.perf_counter()
import monolith
seconds = time.perf_counter() - start
after = state()
changed = [key for key in before if before[key] != after[key]]
heavy = [name for name in ("torch", "numpy", "rich", "tyro", *STANDARD) if name in sys.modules]
print(json.dumps({"changed": changed, "heavy": heavy, "seconds": seconds}))
""")
    assert seen["changed"] == []
    assert seen["heavy"] == []
    assert seen["seconds"] < 0.5


@pytest.fixture(scope="module")
def imported() -> Any:
    """What the rooms that a model is written with load, and what importing any module changes."""
    return run("""
import importlib, importlib.util, pkgutil
import numpy, torch  # what they do on import is theirs
import monolith, monolith_bench, monolith_compat
changed = {}

def watched(name):
    before = state()
    importlib.import_module(name)
    after = state()
    differs = [key for key in before if before[key] != after[key]]
    if differs:
        changed[name] = differs

before = {name.split(".")[0] for name in sys.modules}
for room in ("tensors", "feature", "table", "nn", "model"):
    name = f"monolith.{room}"
    if importlib.util.find_spec(name) is not None:
        watched(name)
loaded = {name.split(".")[0] for name in sys.modules} - before
import prometheus_client, rich.console, rich.progress, tyro, fsspec, asyncio, multiprocessing
# Kernels are imported when they are first used; Triton comes with a CUDA build of torch.
absent = ["monolith.nn.layers.jagged_kernels"] if importlib.util.find_spec("triton") is None else []
for package in (monolith, monolith_bench, monolith_compat):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(".__main__") and module.name not in absent:
            watched(module.name)
others = sorted(loaded - set(sys.stdlib_module_names) - {"monolith", "monolith_bench", "monolith_compat"})
print(json.dumps({"rooms load": others, "changed": changed}))
""")


def test_importing_any_module_starts_opens_seeds_and_installs_nothing(imported: Any) -> None:
    assert imported["changed"] == {}


def test_the_rooms_a_model_is_written_with_load_only_torch_and_numpy(imported: Any) -> None:
    assert [name for name in imported["rooms load"] if not name.startswith("_")] == []


def test_a_step_is_trained_without_importing_torchs_compiler(tmp_path: Path) -> None:
    seen = run(f"""
sys.path.append({str(PROJECT / "tests")!r})
import contextlib
from monolith.cli.main import main
words = ["train", "train.tasks:Clicks", "--steps", "1", "--model-dir", {str(tmp_path)!r}, "--quiet"]
with contextlib.redirect_stdout(sys.stderr):
    main(words)
print(json.dumps({{"saved": os.listdir({str(tmp_path)!r}), "compiler": "torch._dynamo" in sys.modules}}))
""")
    assert "model.ckpt-1.manifest" in seen["saved"]
    assert not seen["compiler"]


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert monolith.__version__ == project["version"]


def test_type_checkers_of_users_are_told_that_the_package_has_types() -> None:
    assert (Path(monolith.__file__).parent / "py.typed").is_file()
