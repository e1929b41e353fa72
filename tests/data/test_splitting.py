"""Which records are held back: the same ones whoever reads them, and never on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.data import Records, concat
from monolith.data.config import DataConfig, DataSplit, Part
from monolith.data.formats.memory import to_records
from monolith.data.splitting import fractions, part_filter
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor

PARTS: tuple[Part, ...] = ("train", "evaluate", "predict")


def records(many: int = 2000) -> Records:
    numbers = torch.arange(many)
    texts = [[f"user {n % 100}".encode()] for n in range(many)]
    return Records(
        many,
        {
            "user": RaggedTensor.from_list(
                [[list(text) for text in row] for row in texts], dtype=torch.uint8
            ),
            "item": RaggedTensor.from_row_lengths(numbers, torch.ones(many, dtype=torch.int64)),
            "price": RaggedTensor.from_row_lengths(numbers.float() / 7, torch.ones(many, dtype=torch.int64)),
        },
    )


def test_parts_have_their_fractions_and_every_record_is_in_one() -> None:
    data, split = records(), DataSplit(evaluate=0.2, predict=0.1)
    masks = [part_filter(part, split)(data) for part in PARTS]
    assert (torch.stack(masks).sum(0) == 1).all()
    shares = [float(mask.double().mean()) for mask in masks]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.03)


@pytest.mark.parametrize("times", [(), ("when",)])
def test_the_core_hashes_records_as_the_columns_alone_are_hashed(times: tuple[str, ...]) -> None:
    when = ["17", "-5", "-", "", "1715000000", "1234567890123456789", "2024-05-01", "1.5", "007", "-007"]
    columns = {
        "id": [[1, -2], [], [1 << 62]] * 10,
        "price": [0.5, -0.0, None] * 10,
        "word": ["a", "", "caf\u00e9"] * 10,
        "when": when * 3,
    }
    plain, names = to_records(columns), list(columns)
    # A column that all records share is beyond the core, and then all are hashed here.
    request = RaggedTensor.from_list([[7]], torch.int64)
    shared = Records(len(plain), {**plain.columns, "request": request}, frozenset({"request"}))
    expected = fractions(shared, names, 3, times)
    assert len(set(expected.tolist())) == len(expected) > 20
    assert fractions(plain, names, 3, times).tolist() == expected.tolist()
    turned = concat([plain.slice(20, 30), plain.slice(0, 20)]).take(torch.arange(29, -1, -1))
    order = [*range(19, -1, -1), *range(29, 19, -1)]
    assert fractions(turned, names, 3, times).tolist() == expected[order].tolist()


@pytest.mark.parametrize(
    ("names", "times", "pinned"),
    [
        ("id price word when", (), ["0x1.6bcc62de25500p-7", "0x1.10fe4c7c8bfecp-1", "0x1.c8a0f69677d9cp-3"]),
        (
            "id price word when",
            ("when",),
            ["0x1.f834ff12ab52dp-1", "0x1.10fe4c7c8bfecp-1", "0x1.186eda3ec5495p-1"],
        ),
        ("word", (), ["0x1.803ec083db78ap-2", "0x1.a2fc068825758p-2", "0x1.305ffad7d049cp-1"]),
        ("id", (), ["0x1.7201fefa5a2a1p-1", "0x1.e273da2cc56b1p-1", "0x1.030f25dd312f8p-3"]),
        ("price", (), ["0x1.d88ca67e2ef38p-2", "0x1.812b975b3f509p-1", "0x1.e273da2cc56b1p-1"]),
    ],
)
def test_a_record_is_in_the_part_in_which_it_was_in_earlier_versions(
    names: str, times: tuple[str, ...], pinned: list[str]
) -> None:
    columns = {
        "id": [[1, -2], [], [1 << 62]],
        "price": [0.5, -0.0, None],
        "word": ["a", "", "caf\u00e9 au lait"],
        "when": ["1715000000", "2024-05-01", "-5"],
    }
    drawn = fractions(to_records(columns), names.split(), 3, times)
    assert [float(one).hex() for one in drawn] == pinned


@pytest.mark.parametrize("shared", [False, True])
def test_the_core_takes_the_records_whose_fraction_is_in_the_part(shared: bool) -> None:
    data = records()
    if shared:
        request = RaggedTensor.from_list([[7]], torch.int64)
        data = Records(len(data), {**data.columns, "request": request}, frozenset({"request"}))
    else:
        data = concat([data.slice(900, 2000), data.slice(0, 900)]).take(torch.arange(1999, -1, -1))
    split = DataSplit(evaluate=0.25, predict=0.1, seed=5)
    drawn = fractions(data, list(data.columns), 5)
    for part, (low, high) in zip(PARTS, [(0.35, 1), (0, 0.25), (0.25, 0.35)], strict=True):
        assert part_filter(part, split)(data).tolist() == ((drawn >= low) & (drawn < high)).tolist()


def test_a_record_is_in_the_same_part_in_whatever_batch_it_comes() -> None:
    data = records()
    whole = fractions(data, ["user", "item", "price"])
    turned = data.take(torch.arange(1999, -1, -1))
    assert (fractions(turned, ["price", "item", "user"])[::-1] == whole).all()
    halves = [
        fractions(data.slice(0, 777), list(data.columns)),
        fractions(data.slice(777, 2000), list(data.columns)),
    ]
    assert [*halves[0], *halves[1]] == list(whole)


def test_every_column_counts_and_so_does_the_seed() -> None:
    data = records()
    drawn = [fractions(data, names) for names in (["item"], ["price"], ["item", "price"], ["user", "item"])]
    drawn.append(fractions(data, ["item"], seed=1))
    assert len({one.tobytes() for one in drawn}) == 5
    assert all(abs(float(one.mean()) - 0.5) < 0.03 for one in drawn)


def test_by_a_column_all_that_are_alike_in_it_stay_together() -> None:
    data = records()
    mask = part_filter("evaluate", DataSplit(evaluate=0.3, by=("user",)))(data)
    sides = mask.view(20, 100)
    assert (sides == sides[0]).all()
    assert 10 < int(sides[0].sum()) < 50


def test_by_time_parts_follow_each_other() -> None:
    data, split = records(10), DataSplit(time="item", evaluate_from=6, predict_from=8)
    kept = [data.keep(part_filter(part, split)(data))["item"].flat_values.tolist() for part in PARTS]
    assert kept == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("times", "at"),
    [
        (["2024-04-30", "2024-05-01T10:00:00Z", "", "2024-05-01 13:00+02:00"], "2024-05-01T10:00:00"),
        (["2024-04-30", "2024-05-01T10:00:00Z", "", "2024-05-01 13:00+02:00"], 1714557600),
        ([1714435200, 1714557600, None, 1714561200], "2024-05-01T12:00+02:00"),
        ([1714435200000, 1714557600000, None, 1714561200000], "2024-05-01T10:00:00Z"),
        (["1714435200000", "1714557600000", None, "1714561200000"], 1714557600000),
        ([3, 6, None, 7], 6),
        (["3", "6", None, "7"], 6.0),
    ],
)
def test_times_may_be_texts_timestamps_or_any_number(times: list[Any], at: Any) -> None:
    data, split = to_records({"t": times}), DataSplit(time="t", evaluate_from=at)
    kept = [part_filter(part, split)(data).tolist() for part in ("train", "evaluate")]
    assert kept == [[True, False, True, False], [False, True, False, True]]  # without a time: trained on


def test_a_part_is_the_same_whether_unix_times_are_numbers_or_texts() -> None:
    numbers = list(range(1_714_557_600, 1_714_557_700))
    shares = [
        part_filter("evaluate", DataSplit(evaluate=0.5), times=["t"])(to_records({"t": times})).tolist()
        for times in (numbers, list(map(str, numbers)))
    ]
    assert shares[0] == shares[1]


def test_by_time_needs_times() -> None:
    split = DataSplit(time="user", evaluate_from=6)
    with pytest.raises(DataError, match="column 'user' has 'user 0', which is neither a time nor a number"):
        part_filter("train", split)(records(3))
    with pytest.raises(DataError, match="several values in column 't'"):
        part_filter("train", DataSplit(time="t", evaluate_from=6))(to_records({"t": [[1, 2]]}))
    with pytest.raises(DataError, match="none of the columns age"):
        part_filter("train", DataSplit(evaluate=0.5, by=("age",)))(records(3))


def test_leave_one_out_tests_the_last_record_of_each_user_and_evaluates_the_one_before(
    tmp_path: Path,
) -> None:
    log = [("a", 1, 10), ("b", 2, 30), ("a", 3, 5), ("b", 4, 30), ("a", 5, 20), ("b", 6, 30), ("c", 7, 1)]
    lines = [f"{user},{item},{at}" for user, item, at in log] + ["c,8,2", "a,9,", ",10,99"]
    for name, some in (("1", lines[:4]), ("2", lines[4:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["user,item,time", *some]) + "\n")
    data = DataConfig(path=f"{tmp_path}/*.csv", split=DataSplit(last_of="user", time="time"))
    types = {"user": torch.uint8, "item": torch.int64}
    read = {
        part: concat(list(data.pipeline(part, 3, types=types)))["item"].flat_values.tolist() for part in PARTS
    }
    # Those of b are of the same time. c has too few; without a user or a time a record is trained on.
    assert read == {"train": [2, 3, 7, 8, 9, 10], "evaluate": [1, 4], "predict": [5, 6]}
    assert data.protocol("predict") == "leave-one-out: the last record of each user by time"


def test_leave_one_out_is_of_files_that_are_there() -> None:
    with pytest.raises(ConfigError, match="files that are there"):
        DataConfig(watch="x/*.csv", split=DataSplit(last_of="user", time="time"))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"last_of": "user"}, "set time"),
        ({"last_of": "user", "time": "t", "evaluate_from": 3}, "not by both"),
        ({}, "nothing is withheld"),
        ({"evaluate": 1.0}, "from 0 to below 1"),
        ({"evaluate": 0.6, "predict": 0.4}, "leave nothing to train on"),
        ({"evaluate_from": 3}, "set time"),
        ({"time": "t", "evaluate_from": "yesterday"}, "a time such as 2024-05-01T10:00:00Z, got 'yesterday'"),
        ({"time": "t"}, "set the value from which"),
        ({"time": "t", "evaluate_from": 3, "evaluate": 0.1}, "not by both"),
        ({"time": "t", "evaluate_from": 3, "predict_from": 2}, "comes after"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(split: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSplit(**split)  # type: ignore[arg-type]


def test_files_of_their_own_or_a_split_but_not_both(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(f"item\n{name}\n")
    here = DataConfig(train=str(tmp_path / "a.csv"), evaluate=str(tmp_path / "b.csv"))
    types = {"item": torch.uint8}
    read = {part: concat(list(here.pipeline(part, 10, types=types))).strings("item") for part in PARTS}
    assert read == {"train": [[b"a"]], "evaluate": [[b"b"]], "predict": [[b"b"]]}
    with pytest.raises(ConfigError, match="both say what to evaluate on"):
        DataConfig(path="x", evaluate="y", split=DataSplit(evaluate=0.1))
    with pytest.raises(ConfigError, match="both say what to train on"):
        DataConfig(path="x", train="y")
    with pytest.raises(ConfigError, match="nothing says what to evaluate on"):
        DataConfig(path="x").part("evaluate")


def test_columns_are_read_with_the_types_of_the_features(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,tags,other\n007,x|y,1\n")
    types = {"user": torch.uint8, "tags": torch.uint8}
    data = DataConfig(path=str(tmp_path / "a.csv"))
    (read,) = data.pipeline("train", 10, types=types)
    assert list(read.columns) == ["user", "tags"]
    assert (read.strings("user"), read.strings("tags")) == ([[b"007"]], [[b"x|y"]])
    (read,) = DataConfig(train="-", predict=str(tmp_path / "a.csv")).pipeline("predict", 10, types=types)
    assert list(read.columns) == ["user", "tags", "other"]
