from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import RestoreError, TableArgumentError
from monolith.table import sharded_names, validate_sharded
from monolith.table.sharded_files import find_sharded, parse, replace_sharded


def test_a_name_says_which_shard_of_how_many() -> None:
    assert sharded_names("a/b", 2) == ["a/b-00000-of-00002", "a/b-00001-of-00002"]
    assert parse("a/b", "a/b-00001-of-00002") == (1, 2)


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_there_is_at_least_one_shard_and_five_digits_of_them(count: int) -> None:
    with pytest.raises(TableArgumentError, match="num_shards"):
        sharded_names("a", count)


@pytest.mark.parametrize(
    "name",
    [
        "a-00000-of-00001-tmp-0123456789ab",
        "a-0-of-1",
        "a-000000-of-000001",
        "a-00000-of-00001\n",
        "a-٠٠٠٠٠-of-00001",
        "ab-00000-of-00001",
        "a-x-00000-of-00001",
        "b-00000-of-00001",
        "a",
        "",
    ],
)
def test_other_names_are_not_shards(name: str) -> None:
    assert parse("a", name) is None


@given(st.text(max_size=8), st.integers(1, 40))
def test_all_shards_in_any_order_are_a_set(basename: str, count: int) -> None:
    names = sharded_names(basename, count)
    assert validate_sharded(basename, reversed(names)) == names


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "no files"),
        (["a-00000-of-00001-tmp-0123456789ab"], "no files"),
        (["a-00000-of-00003", "a-00002-of-00003"], "1 of 3 shards are missing: 1"),
        (["a-00000-of-00001", "a-00000-of-00002", "a-00001-of-00002"], "of 1 and of 2 shards"),
        (["a-00001-of-00001"], "cannot be a shard 1 of 1"),
        (["a-00000-of-00000"], "cannot be a shard 0 of 0"),
        (["a-00000-of-00001", "b-00000-of-00001"], "begins differently"),
    ],
)
def test_what_is_not_one_complete_set_is_refused(names: list[str], reason: str) -> None:
    with pytest.raises(RestoreError, match=reason):
        validate_sharded("a", names)


def test_a_basename_that_begins_like_another_is_independent(tmp_path: Path) -> None:
    for name in [*sharded_names("t1", 2), *sharded_names("t10", 1), *sharded_names("t1-00000-of-00002", 3)]:
        (tmp_path / name).touch()
    assert find_sharded(f"{tmp_path}/t1") == sharded_names(f"{tmp_path}/t1", 2)
    assert find_sharded(f"{tmp_path}//t10") == sharded_names(f"{tmp_path}//t10", 1)
    with pytest.raises(RestoreError, match="no files"):
        find_sharded(f"{tmp_path}/t")
    with pytest.raises(RestoreError, match="no files"):
        find_sharded(f"{tmp_path}/absent/t1")


def test_brackets_in_a_basename_are_no_pattern(tmp_path: Path) -> None:
    for name in [*sharded_names("t[1]", 1), *sharded_names("t1", 2)]:
        (tmp_path / name).touch()
    assert find_sharded(f"{tmp_path}/t[1]") == [f"{tmp_path}/t[1]-00000-of-00001"]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def write(basename: str, *texts: str) -> None:
    with replace_sharded(basename, len(texts)) as files:
        for file, text in zip(files, texts, strict=True):
            file.write(text.encode())


def test_a_new_set_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    write(f"{tmp_path}/new/t", "a", "b")
    write(f"{tmp_path}/new/t", "c")
    assert contents(tmp_path / "new") == {"t-00000-of-00001": "c"}


def test_a_set_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    def fail() -> None:
        with replace_sharded(f"{tmp_path}/t", 2) as files:
            files[0].write(b"new")
            raise ZeroDivisionError

    write(f"{tmp_path}/t", "a", "b")
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert contents(tmp_path) == before
