"""A run is known by an id in its folder."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from monolith.sync.messages import ID_FILE, is_same_run, run_identity, split_identity

FIRST, SECOND = "0123456789abcdef", "fedcba9876543210"


def test_a_run_that_is_started_again_has_the_id_that_the_first_start_left(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert run_identity(folder) == folder
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: run_identity(folder, make=True), range(32)))
    assert found == {run_identity(folder)}
    assert re.fullmatch(rf"{re.escape(folder)}#[0-9a-f]{{16}}", found.pop())
    assert [path.name for path in Path(folder).iterdir()] == [ID_FILE]


def test_another_run_in_a_folder_of_the_same_name_is_another(tmp_path: Path) -> None:
    before = run_identity(str(tmp_path), make=True)
    (tmp_path / ID_FILE).unlink()
    assert not is_same_run(before, run_identity(str(tmp_path), make=True))


def test_a_remote_run_is_known_by_its_folder() -> None:
    assert run_identity("s3://bucket/run", make=True) == "s3://bucket/run"


def test_an_id_that_is_something_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / ID_FILE).write_text("not an id")
    assert run_identity(str(tmp_path), make=True) == str(tmp_path)


def test_runs_are_compared_by_id_and_by_folder_if_one_has_none() -> None:
    assert is_same_run(f"/a#{FIRST}", f"/moved#{FIRST}")
    assert not is_same_run(f"/a#{FIRST}", f"/a#{SECOND}")
    assert is_same_run("/a", f"/a#{FIRST}")
    assert not is_same_run("/a", f"/b#{FIRST}")
    assert split_identity("/a#b") == ("/a#b", "")
