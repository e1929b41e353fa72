"""Transforms as stages: numbered, with what they remember in the position, exact over a restart."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data.transforms.record_lists import records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data import FileSource, MemorySource, Records, Shard, ShuffleConfig
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.pipeline import Pipeline
from monolith.data.sampling import ItemPoolConfig, NegativeGeneration, NegativeGenerationConfig
from monolith.data.transforms import (
    TRANSFORMS,
    AddAction,
    AddLabel,
    BlankInvalidLabels,
    Compose,
    DecodeValues,
    EncodeValues,
    FeatureCombine,
    FilterByAction,
    FilterByFid,
    FilterByLabel,
    FilterBySlot,
    FilterByValue,
    InstanceReweight,
    LabelNormalization,
    LabelUpperBound,
    LogicalOr,
    LogOddsCorrection,
    MergeFlow,
    NegativeDownsample,
    NormStep,
    ScatterLabel,
    SlotFilter,
    SpecialStrategy,
    SwitchSlot,
    Transform,
    UseFieldAsLabel,
)
from monolith.errors import ConfigError, DataError, RestoreError

COUNT = 40
ITEM, ACTIONS, CHANNEL = "line_id.item_id", "line_id.actions", "line_id.chnid"


@cache
def a_log() -> Records:
    """Impressions with everything that some transform reads."""
    return records_of(
        [
            {
                "id": [i],
                "label": [float(i % 3 == 0), float(i % 5)],
                ACTIONS: [i % 4],
                "line_id.special_strategies": [i % 3] if i % 2 else [],
                "line_id.sample_rate": [0.5],
                "line_id.req_time": [1000 + i],
                CHANNEL: [i % 2],
                ITEM: [i % 17],
                "title": [b"t%d" % (i % 17)],
                "price": [i / 2],
                "slot": [(5 << 48) + i],
                "other": [(7 << 48) + i % 3],
                "where": [i % 2],
            }
            for i in range(COUNT)
        ]
    )


def negatives(**options: Any) -> NegativeGeneration:
    return NegativeGeneration(
        NegativeGenerationConfig(
            neg_num=2,
            item_features=("title",),
            pool=ItemPoolConfig(start_num=2, max_item_num_per_channel=6),
            per_channel=True,
            easy_hard_ratio=0.5,
            unbiased=True,
            negative_in_pool_rate=0.3,
            **options,
        )
    )


VALUE = FilterByValue(column="line_id.req_time", op="ge", operand=1007)
KINDS: dict[str, Callable[[], Transform]] = {
    "AddAction": lambda: AddAction(where=VALUE, action=9),
    "AddLabel": lambda: AddLabel(tasks="1:2:0.5"),
    "BlankInvalidLabels": BlankInvalidLabels,
    "DecodeValues": lambda: Compose(
        [
            EncodeValues(column="price", codec="f16", into="text"),
            DecodeValues(column="text", codec="f16", into="price"),
        ]
    ),
    "EncodeValues": lambda: EncodeValues(column="price", codec="f16", into="text"),
    "FeatureCombine": lambda: FeatureCombine(left="slot", right="other", slot=9, into="both"),
    "FilterByAction": lambda: FilterByAction(has_actions=(1, 2)),
    "FilterByFid": lambda: FilterByFid(filter_fids=((5 << 48) + 3,), columns=("slot",)),
    "FilterByLabel": lambda: FilterByLabel(thresholds=(1.0,)),
    "FilterBySlot": lambda: FilterBySlot(select_slots=(5,), columns=("slot",)),
    "FilterByValue": lambda: VALUE,
    "InstanceReweight": lambda: InstanceReweight(action_priority=(1, 0), rules="0:2:0,1:3:1"),
    "LabelNormalization": lambda: LabelNormalization(steps=(NormStep(method="scale", value=2.0),)),
    "LabelUpperBound": lambda: LabelUpperBound(bounds=(0.5, 2.0)),
    "LogOddsCorrection": LogOddsCorrection,
    "LogicalOr": lambda: LogicalOr(left=VALUE, right=FilterByAction(has_actions=(1,))),
    "NegativeDownsample": lambda: NegativeDownsample(drop_rate=0.5, seed=3),
    "ScatterLabel": lambda: ScatterLabel(positions="0:0,1:1"),
    "SlotFilter": lambda: SlotFilter(drop=(5,), columns=("slot", "other")),
    "SpecialStrategy": lambda: SpecialStrategy(rules="0:0.5,1:0.5:1,2:1"),
    "SwitchSlot": lambda: SwitchSlot(column="slot", slot=9),
    "UseFieldAsLabel": lambda: UseFieldAsLabel(column="price"),
    "NegativeGeneration": negatives,
    "all kinds of memory": lambda: Compose(
        [NegativeDownsample(drop_rate=0.3), negatives(seed=5), NegativeDownsample(drop_rate=0.3, seed=1)]
    ),
}


def stages(kind: str, source: MemorySource, *, around: bool, every: int = 13) -> Pipeline:
    """One transform, alone or with whatever else there is before and after it."""
    plain = Pipeline(source)
    if not around:
        return plain.transform(KINDS[kind](), snapshot_every=every)
    return (
        plain.shuffle(ShuffleConfig(seed=2, buffer=11))
        .rebatch(5)
        .prefetch(1)
        .transform(KINDS[kind](), snapshot_every=every)
        .shuffle(ShuffleConfig(seed=1, buffer=9))
        .prefetch(2)
        .rebatch(4)
    )


def source(batch_size: int = 7) -> MemorySource:
    return MemorySource(a_log(), batch_size=batch_size)


def rows(pipeline: Pipeline) -> list[Any]:
    return [row for records in pipeline for row in rows_of(records)]


def test_there_is_every_kind_of_transform_and_sampler() -> None:
    assert KINDS.keys() >= TRANSFORMS.keys()


DECIDING_BY_MORE_THAN_CONTENT = ["AddLabel", "NegativeDownsample", "SpecialStrategy", "all kinds of memory"]


@pytest.mark.parametrize(
    "kind, around",
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in DECIDING_BY_MORE_THAN_CONTENT)],
)
def test_a_fresh_pipeline_resumes_anywhere_with_the_same_records(kind: str, around: bool) -> None:
    whole = rows(stages(kind, source(), around=around))
    assert whole
    running, delivered, saved = stages(kind, source(), around=around), 0, []
    for records in running:
        delivered += len(records)
        saved.append((delivered, json.dumps(running.position())))
    for count, position in saved[::3]:
        resumed = stages(kind, source(), around=around)
        resumed.restore(json.loads(position))
        assert resumed.position() == json.loads(position)
        assert rows(resumed) == whole[count:]
        resumed.close()


@settings(deadline=None, max_examples=12)
@given(
    stop=st.integers(0, 12),
    again=st.integers(0, 12),
    before=st.integers(1, 20),
    after=st.integers(1, 20),
    every=st.integers(1, 70),
)
def test_batches_snapshots_and_a_second_stop_change_nothing(
    stop: int, again: int, before: int, after: int, every: int
) -> None:
    kind = "all kinds of memory"
    whole = rows(stages(kind, source(), around=False))
    found: list[Any] = []
    position = stages(kind, source(), around=False, every=every).position()
    for batch_size, batches in ((before, stop), (after, again), (7, COUNT)):
        running = stages(kind, source(batch_size), around=False, every=every)
        running.restore(json.loads(json.dumps(position)))
        for records in islice(running, batches):
            found += rows_of(records)
            position = running.position()
    assert found == whole


def test_a_pipeline_draws_what_the_transform_draws_of_the_whole_stream() -> None:
    whole = rows_of(NegativeDownsample(drop_rate=0.5, seed=3)(a_log(), first=0))
    assert rows(stages("NegativeDownsample", source(3), around=False)) == whole


def test_transforms_in_a_row_are_one_list_and_a_record_keeps_its_number() -> None:
    parts = (FilterByAction(has_actions=(1, 2)), NegativeDownsample(drop_rate=0.5))
    one_by_one = Pipeline(source()).transform(parts[0]).transform(parts[1])
    assert rows(one_by_one) == rows_of(Compose(parts)(a_log(), first=0))


def test_a_transform_of_content_alone_has_the_position_of_its_source() -> None:
    below = source()
    pipeline = Pipeline(below).transform(FilterByLabel(thresholds=(1.0,)))
    pipeline = pipeline.transform(SwitchSlot(column="slot", slot=9))
    next(iter(pipeline))
    assert pipeline.position() == below.position()


def test_positions_between_two_snapshots_share_one() -> None:
    pipeline = stages("NegativeGeneration", source(7), around=False, every=21)
    states = [pipeline.position()["state"] for _ in pipeline]
    assert states[0] is states[1]
    assert states[1] is not states[2]


def test_over_a_source_that_may_not_repeat_its_order_no_record_is_transformed_again() -> None:
    class Unordered(MemorySource):
        repeats_order = False

    pipeline = Pipeline(Unordered(a_log(), batch_size=7)).transform(negatives(), snapshot_every=1000)
    assert [pipeline.position()["skip"] for _ in pipeline] == [0] * 6


def test_what_is_left_goes_to_another_number_of_workers_each_record_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{part}.parquet") for part in range(4)]
    for part, path in enumerate(paths):
        with ParquetFormat().writer(path) as writer:
            writer.write(a_log().slice(10 * part, 10 * part + 10).select(["id", "label"]))

    def worker(share: Shard, transform: Transform) -> Pipeline:
        pipeline = Pipeline(FileSource(paths, ParquetFormat(), batch_size=4)).transform(transform)
        pipeline.read_shard(share)
        return pipeline

    def ids(pipeline: Pipeline, batches: int) -> list[int]:
        return [one for batch in islice(pipeline, batches) for one in batch["id"].flat_values.tolist()]

    def nothing_dropped() -> Transform:
        return NegativeDownsample(drop_rate=0.0)

    old = [worker(Shard(number, 2), nothing_dropped()) for number in range(2)]
    seen = [one for number, pipeline in enumerate(old) for one in ids(pipeline, number + 1)]
    positions = worker(Shard(0, 3), nothing_dropped()).redistribute([one.position() for one in old], 3)
    for number, position in enumerate(positions):
        new = worker(Shard(number, 3), nothing_dropped())
        new.restore(position)
        assert position["number"] == 8  # beyond what any of the old ones has drawn for
        seen += ids(new, COUNT)
    assert sorted(seen) == list(range(COUNT))
    remembering = worker(Shard(0, 3), Failing())
    with pytest.raises(RestoreError, match="Failing of a pipeline remembers what its worker saw"):
        remembering.redistribute([remembering.position()], 3)
    with pytest.raises(RestoreError, match="decides by the number of a record"):
        old[0].adopt(positions[0])


class Failing:
    """Fails once, after it has changed what it remembers."""

    def __init__(self) -> None:
        self.seen, self.fails = 0, True

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        self.seen += len(records)
        if self.fails and self.seen > 10:
            self.fails = False
            raise DataError("out of luck")
        numbers = torch.arange(self.seen - len(records), self.seen)
        return records.with_columns({"seen": records["id"].with_flat_values(numbers)})

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_after_a_failure_it_resumes_before_the_failed_batch() -> None:
    failing = Failing()
    pipeline = Pipeline(source()).transform(failing)
    with pytest.raises(DataError, match="out of luck"):
        list(pipeline)
    assert [row["seen"][0] for row in rows(pipeline)] == list(range(7, COUNT))


# What cannot be exact


class Drawing:
    def __init__(self) -> None:
        self.luck = random.Random(1)

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        return records


class OnlySaving(Drawing):
    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    "transform, why",
    [
        (Drawing(), "draws from its 'luck'"),
        (OnlySaving(), "needs state\\(\\) and restore\\(\\)"),
        (Compose([FilterByAction(has_actions=(1,)), Drawing()]), "draws from its 'luck'"),
        (lambda records: records, "goes into map\\(\\)"),
        (FilterByAction, "is a class"),
        (MergeFlow({"a": source()}), "is a source"),
        (7, "is not a transform"),
    ],
)
def test_what_would_begin_again_after_a_restart_is_refused(transform: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Pipeline(source()).transform(transform)


def test_one_memory_is_one_stage() -> None:
    once = negatives()
    with pytest.raises(ConfigError, match="is a stage already"):
        Pipeline(source()).transform(once).rebatch(3).transform(once)


class Tupled(Failing):
    def state(self) -> dict[str, Any]:
        return {"seen": (self.seen,)}


def test_a_state_that_json_would_change_is_refused() -> None:
    with pytest.raises(DataError, match="Tupled remembers cannot be saved exactly"):
        Pipeline(source()).transform(Tupled()).position()


def test_a_state_of_other_transforms_is_refused_and_nothing_has_moved() -> None:
    position = stages("NegativeGeneration", source(), around=False).position()
    stateless = stages("NegativeDownsample", source(), around=False)
    with pytest.raises(RestoreError, match="none here remembers"):
        stateless.restore(position)
    counting = Pipeline(source()).transform(failing := Failing())
    failing.fails = False
    next(iter(counting))
    for wrong in ({**position, "state": {"0": {}}}, {**counting.position(), "source": {}}):
        with pytest.raises(RestoreError):
            counting.restore(wrong)
    assert [row["seen"][0] for row in rows(counting)] == list(range(7, COUNT))


def test_a_snapshot_needs_a_record() -> None:
    with pytest.raises(ConfigError, match="snapshot_every"):
        Pipeline(source()).transform(negatives(), snapshot_every=0)
