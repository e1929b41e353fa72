"""What `make wheels` builds installs into a clean environment, and trains there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def do(*words: str, cwd: Path, **environment: str) -> str:
    """Run something to its end; return what it printed."""
    plain = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        words, cwd=cwd, env=plain | environment, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.soak
def test_a_wheel_in_a_clean_environment_trains_the_ten_lines(tmp_path: Path) -> None:
    do("make", "wheels", f"WHEELS={tmp_path}", cwd=ROOT)
    (wheel,) = tmp_path.glob("monolith_recsys-*.whl")
    do(sys.executable, "-m", "venv", "clean", cwd=tmp_path)
    python = str(tmp_path / "clean" / "bin" / "python")
    do(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel), cwd=tmp_path)
    at = do(python, "-c", "import monolith; print(monolith.__file__)", cwd=tmp_path)
    assert at.startswith(str(tmp_path))
    example = (ROOT / "examples" / "ten_lines.py").read_text()
    (tmp_path / "ten_lines.py").write_text(example)
    printed = do(python, "ten_lines.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    (reached,) = re.findall(r"test AUC (0\.\d+)", printed)
    assert float(reached) > 0.8
    monolith = str(tmp_path / "clean" / "bin" / "monolith")
    assert "my-shop" in do(monolith, "new", "my-shop", cwd=tmp_path)
    do(monolith, "train", "--config", "run.toml", "--quiet", cwd=tmp_path / "my-shop", OMP_NUM_THREADS="1")


@pytest.mark.skipif(
    shutil.which("cmake") is None or find_spec("nanobind") is None, reason="needs cmake and nanobind"
)
def test_a_build_without_isolation_finds_the_nanobind_of_its_python(tmp_path: Path) -> None:
    """As `pip install --no-build-isolation` configures it, with no word of where nanobind is."""
    how = ["-DSKBUILD=1", f"-DPython_EXECUTABLE={sys.executable}", "-B", str(tmp_path)]
    environment = {name: text for name, text in os.environ.items() if name != "nanobind_DIR"}
    done = subprocess.run(
        ["cmake", "-S", str(ROOT), *how], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_the_image_is_made_of_is_there() -> None:
    """Docker is not needed to see that a file was renamed."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert len(copied) == 4
    assert [name for names in copied for name in names if not (ROOT / name).exists()] == []
