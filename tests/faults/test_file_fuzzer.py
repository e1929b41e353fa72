"""Damaged files of every kind are records, or an error of ours. `make fuzz` does more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow.flight")
pytest.importorskip("grpc")

from faults.file_fuzzer import fuzz_files, honest_files


def test_every_kind_of_file_is_read_or_refused_however_it_is_damaged(tmp_path: Path) -> None:
    counts = fuzz_files(5.0, 1, tmp_path)
    assert {name.partition(":")[0] for name in counts} == set(honest_files(tmp_path))


def test_honest_files_are_read(tmp_path: Path) -> None:
    for data, read in honest_files(tmp_path).values():
        path = tmp_path / "honest"
        path.write_bytes(data)
        assert read(path)
