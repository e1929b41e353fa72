"""Downsampling negatives, and the correction that makes up for it."""

from __future__ import annotations

import math

import pytest
import torch
from data.transforms.record_lists import cuts, floats, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data.formats.memory import to_records
from monolith.data.transforms import FilterByLabel, LogOddsCorrection, NegativeDownsample, sample_rates
from monolith.errors import ConfigError, DataError
from monolith.nn.layers import LogitCorrection

ACTIONS, RATE = "line_id.actions", "line_id.sample_rate"


def test_positives_stay_and_a_fraction_of_the_negatives_is_dropped():
    rows = [{"label": [float(i % 2)]} for i in range(4000)]
    left = NegativeDownsample(drop_rate=0.75)(records_of(rows), first=0)["label"].flat_values
    assert int((left == 1).sum()) == 2000
    assert int((left == 0).sum()) == pytest.approx(500, abs=60)


def test_remaining_records_carry_the_kept_fraction_of_negatives():
    rows = [{"label": [1.0]}, {"label": [1.0], RATE: [0.5]}]
    kept = NegativeDownsample(drop_rate=0.75)(records_of(rows), first=0)
    assert sample_rates(kept).tolist() == [0.25, 0.125]


def test_a_record_without_a_label_is_negative():
    kept = NegativeDownsample(drop_rate=0.9)(records_of([{"a": [1]}] * 1000), first=0)
    assert 50 < len(kept) < 150


def test_the_first_listed_action_has_its_own_rate():
    rows = [{"label": [0.0], ACTIONS: actions} for actions in ([1], [2], [2, 1], [3])] * 1000
    per_action = NegativeDownsample(drop_rate=0.9, per_action="1:0.5, 2:0.0")
    kept = per_action(records_of(rows), first=0)
    shares = {}
    for row in rows_of(kept):
        key = tuple(row[ACTIONS])
        shares.setdefault(key, []).append(row[RATE][0])
    assert {key: set(rates) for key, rates in shares.items()} == {
        (1,): {0.5},
        (2,): {1.0},
        (2, 1): {0.5},
        (3,): set(floats(0.1)),
    }
    assert len(shares[(2,)]) == 1000
    assert len(shares[(1,)]) == pytest.approx(500, abs=60)
    assert len(shares[(3,)]) == pytest.approx(100, abs=40)


def test_the_corrected_logit_of_the_true_odds_is_the_logit_of_what_is_left():
    rows = [{"label": [float(i % 5 == 0)]} for i in range(50_000)]  # odds 1 to 4
    left = NegativeDownsample(drop_rate=0.8)(records_of(rows), first=0)
    share = left["label"].flat_values.mean().item()
    corrected = LogitCorrection()(torch.full((len(left),), math.log(1 / 4)), sample_rates(left))
    assert corrected.mean().item() == pytest.approx(math.log(share / (1 - share)), abs=0.05)


def test_the_correction_can_be_read_as_a_feature():
    records = LogOddsCorrection()(records_of([{RATE: [0.5]}, {"a": [1]}]), first=0)
    assert records["logit_correction"].flat_values.tolist() == pytest.approx([math.log(2), 0.0])
    logits = torch.tensor([2.0, -1.0])
    seen = LogitCorrection()(logits, sample_rates(records))
    assert (logits + records["logit_correction"].flat_values).tolist() == seen.tolist()


def test_a_sample_rate_that_is_not_above_0_is_an_error():
    with pytest.raises(DataError, match=r"must be above 0, got 0\.0"):
        sample_rates(records_of([{RATE: [0.5]}, {RATE: [0.0]}]))


@pytest.mark.parametrize(
    "config",
    [
        {"drop_rate": 1.0},
        {"drop_rate": -0.1},
        {"drop_rate": 0.5, "per_action": "1:1.0"},
        {"drop_rate": 0.5, "per_action": "1"},
        {"drop_rate": 0.5, "per_action": "1:0.1,1:0.2"},
        {"drop_rate": 0.5, "label_index": -1},
        {"drop_rate": 0.5, "seed": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(config):
    with pytest.raises(ConfigError, match="negative downsample"):
        NegativeDownsample(**config)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30), cuts, st.integers(0, 1 << 62), st.integers(0, 3))
def test_what_is_dropped_does_not_depend_on_cuts(positive, cuts, first, seed):
    records = records_of([{"label": [float(one)], "a": [i]} for i, one in enumerate(positive)])
    half = NegativeDownsample(drop_rate=0.5, seed=seed)
    assert on_slices(half, records, cuts, first) == rows_of(half(records, first=first))


def test_another_seed_drops_others():
    records = records_of([{"label": [0.0], "a": [i]} for i in range(100)])
    one, other = (NegativeDownsample(drop_rate=0.5, seed=seed)(records, first=0) for seed in (1, 2))
    assert rows_of(one) != rows_of(other)


@pytest.mark.parametrize("transform", [NegativeDownsample(drop_rate=0.5), FilterByLabel(thresholds=(0.5,))])
def test_a_table_without_labels_is_refused_instead_of_taken_for_negatives(transform):
    with pytest.raises(DataError, match=r"no column 'label' to tell positives by; they have item"):
        transform(to_records({"item": [1, 2]}), first=0)
    kept = transform(to_records({"label": [1, 1]}), first=0)
    assert len(kept) == 2
