"""Transforms as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
from data.transforms.record_lists import cuts, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.config import config_from_mapping, load_config, to_dict
from monolith.data.transforms import (
    TRANSFORMS,
    AddAction,
    AddLabel,
    AnyFilter,
    AnyTransform,
    Filter,
    FilterByAction,
    FilterByFid,
    FilterByLabel,
    FilterByValue,
    LabelNormalization,
    LogicalOr,
    NormStep,
    TransformsConfig,
    read_transforms,
)
from monolith.errors import ConfigError

ACTIONS = "line_id.actions"


def test_a_record_is_kept_if_either_filter_keeps_it():
    either = LogicalOr(left=FilterByAction(has_actions=(1,)), right=FilterByLabel(thresholds=(1.0,)))
    rows = [
        {ACTIONS: [1], "label": [0.0]},
        {ACTIONS: [2], "label": [1.0]},
        {ACTIONS: [2], "label": [0.0]},
        {ACTIONS: [1], "label": [1.0]},
    ]
    assert either.mask(records_of(rows)).tolist() == [True, True, False, True]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=8), cuts)
def test_either_filter_does_not_depend_on_cuts(rows, cuts):
    either = LogicalOr(left=FilterByAction(has_actions=(1,)), right=FilterByLabel(thresholds=(1.0,)))
    records = records_of([{ACTIONS: [one], "label": [float(two)]} for one, two in rows])
    assert on_slices(either, records, cuts) == rows_of(either(records, first=0))


def test_every_transform_is_in_the_table_under_the_name_of_its_class():
    assert set(get_args(AnyTransform)) == set(TRANSFORMS.values())
    assert all(name == kind.__name__ for name, kind in TRANSFORMS.items())
    leaves = {kind for kind in TRANSFORMS.values() if issubclass(kind, Filter)} - {LogicalOr}
    assert set(get_args(AnyFilter)) == leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    batch_size: int
    transforms: tuple[AnyTransform, ...] = ()


A_FILE = """
batch_size = 512

[[transforms]]
type = "FilterByValue"
column = "line_id.req_time"
op = "ge"
operand = 100

[[transforms]]
type = "LogicalOr"
left = { type = "FilterByFid", has_fids = [7] }
right = { type = "FilterByAction", has_actions = [1, 2] }

[[transforms]]
type = "AddLabel"
tasks = "1::1"

[[transforms]]
type = "LabelNormalization"
steps = [{ method = "scale", value = 2.0 }]

[[transforms]]
type = "AddAction"
action = 9
where = { column = "a", op = "any", operand = [7, 8] }
"""


def test_a_run_declares_its_transforms_in_its_file(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(A_FILE)
    assert load_config(RunConfig, file=file).transforms == (
        FilterByValue(column="line_id.req_time", op="ge", operand=100),
        LogicalOr(left=FilterByFid(has_fids=(7,)), right=FilterByAction(has_actions=(1, 2))),
        AddLabel(tasks="1::1"),
        LabelNormalization(steps=(NormStep(method="scale", value=2.0),)),
        AddAction(action=9, where=FilterByValue(column="a", op="any", operand=(7, 8))),
    )


def test_a_config_of_transforms_can_be_written_and_read_back(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(A_FILE)
    config = TransformsConfig(transforms=load_config(RunConfig, file=file).transforms)
    assert config_from_mapping(TransformsConfig, to_dict(config)) == config


def test_plain_data_becomes_transforms_that_run():
    transforms = read_transforms(
        [
            {"type": "FilterByAction", "has_actions": [1]},
            {"type": "AddLabel", "tasks": "2::1"},
        ]
    )
    rows = [{ACTIONS: [1, 2]}, {ACTIONS: [2]}, {ACTIONS: [1]}]
    assert transforms(records_of(rows), first=0)["label"].to_list() == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "FilterByMood"}, "expected one of AddAction, AddLabel"),
        ({"type": "FilterByAction", "has_action": [1]}, "nearest known key is .*has_actions"),
        ({"type": "FilterByAction", "has_actions": ["a"]}, "expected"),
        ({"type": "AddLabel", "tasks": "1:1:1"}, "both positive and negative"),
        (
            {
                "type": "LogicalOr",
                "left": {"type": "AddLabel", "tasks": "1::1"},
                "right": {"type": "FilterByFid"},
            },
            "expected one of FilterByAction",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_and_named(table, message):
    with pytest.raises(ConfigError, match=message):
        read_transforms([table])
