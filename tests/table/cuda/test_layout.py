"""What a table's kernels are made of. The source is looked at, not compiled: it needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monolith.table import Adam, Constant, Fp16, OneBit, Segment, TableConfig
from monolith.table.config import EmbeddingDtype
from monolith.table.cuda.layout import row_layout


def config(*segments: Segment, serving: bool = False, name: str = "item", seed: int = 0) -> TableConfig:
    return TableConfig(name=name, segments=segments, serving=serving, seed=seed)


def test_values_and_state_are_separate_and_a_serving_row_is_its_codes_in_whole_words() -> None:
    segments = Segment(dim=3, optimizer=Adam(), compressor=Fp16()), Segment(dim=1, compressor=OneBit())
    trained, served = row_layout(config(*segments)), row_layout(config(*segments, serving=True))
    assert (trained.row_bytes, trained.state_dim, trained.bytes_per_place) == (16, 8, 12 + 16 + 32)
    assert (served.row_bytes, served.state_dim, served.bytes_per_place) == (8, 0, 12 + 8)


def test_so_few_threads_work_on_a_row_that_each_fetches_four_values_at_once() -> None:
    dims = (1, 2, 3, 8, 16, 17, 32, 33, 64, 128, 200)
    lanes = [row_layout(config(Segment(dim=dim))).lanes for dim in dims]
    assert lanes == [1, 2, 4, 8, 8, 8, 8, 16, 16, 32, 32]


def test_tables_of_equal_rows_share_their_kernels() -> None:
    one, other = config(Segment(dim=2), name="item"), config(Segment(dim=2), name="user")
    assert row_layout(one).rows == row_layout(other).rows
    assert row_layout(one).rows != row_layout(config(Segment(dim=2), seed=1)).rows


def test_settings_reach_the_source_to_the_last_bit() -> None:
    layout = row_layout(config(Segment(dim=2, initializer=Constant(0.1))))
    assert "kLow = 0x1.99999a0000000p-4f;" in layout.header
    assert dict(layout.rows.headers)["layout.h"] == layout.header


@pytest.mark.parametrize("dtype, row_bytes", [("bfloat16", 12), ("float16", 12), ("int8", 8 + 2 * 4)])
def test_narrow_values_take_whole_words_and_int8_a_scale_for_each_segment(
    dtype: EmbeddingDtype, row_bytes: int
) -> None:
    segments = Segment(dim=2), Segment(dim=3)
    stored = replace(config(*segments), embedding_dtype=dtype)
    assert row_layout(stored).row_bytes == row_bytes
    assert row_layout(replace(stored, serving=True)) == row_layout(config(*segments, serving=True))
