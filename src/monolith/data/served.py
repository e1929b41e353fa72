"""Served features: what a server read and answered, as records that training reads back.

A server logs one record for each row of an answered request (`[serve.log]`). The columns of a record:

    line_id.req_id     the ID of the request, text
    line_id.req_time   when it was answered, int64 Unix seconds
    served.row         which row of the request it is, from 0
    served.key         both, as ID/ROW: one key for each record, by which labels are joined
    served.model       the model that answered, text
    served.version     its version, text
    served.step        the training step of its oldest rows, int64
    served.score.HEAD  float32, an output of the model
    FEATURE            by its name: the IDs (int64) or floats (float32) that the model was given
    FEATURE.weights    float32 for each ID, if the feature has weights

Features are logged after all that a `FeatureSpec` does to raw columns: hashing, buckets, crosses, scaling and
missing values. So a `ServedSpec` reads them back without doing it again, and a model trains on the very
numbers that were served, also if the code that makes raw columns has changed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.data.records import LINE_ID, REQ_TIME, Records, take_rows, text_rows
from monolith.errors import DataError
from monolith.feature import Batch, CrossFeature, FeatureSpec, HistoryFeature, IdFeature
from monolith.feature.spec import GAP
from monolith.feature.spec.problems import BadReason
from monolith.feature.spec.reading import RawColumns, RawReader, Reading, numbers_of
from monolith.feature.spec.times import TIME
from monolith.tensors import RaggedTensor

SERVED = "served."
"""What the columns of a log begin with that are neither features nor of a LineId."""
REQ_ID = LINE_ID + "req_id"
ROW = SERVED + "row"
KEY = SERVED + "key"
MODEL = SERVED + "model"
VERSION = SERVED + "version"
STEP = SERVED + "step"
SCORE = SERVED + "score."
WEIGHTS = ".weights"
"""Behind the name of a feature: the column of the weights of its IDs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRequest:
    """An answered request, apart from its features."""

    id: str
    time: int
    """Unix seconds."""
    model: str
    version: str
    step: int
    rows: int
    scores: Mapping[str, NDArray[Any]]
    """Output -> an array whose first dimension is the rows."""


def served_records(batch: Batch, requests: Sequence[ServedRequest]) -> Records:
    """Return the log of some requests of one model.

    Args:
        batch: The rows of all requests, one request after another.

    Raises:
        DataError: A feature has the name of another column of the log.
    """
    columns = feature_columns(batch)
    rows = [number for one in requests for number in range(one.rows)]
    each = torch.tensor([one.rows for one in requests])
    keys = [_bytes(f"{one.id}/{row}") for one in requests for row in range(one.rows)]
    about = {
        REQ_ID: _texts([one.id for one in requests], each),
        REQ_TIME: _numbers(torch.tensor([one.time for one in requests]).repeat_interleave(each)),
        ROW: _numbers(torch.tensor(rows, dtype=torch.int64)),
        KEY: _single(text_rows(keys)),
        MODEL: _texts([one.model for one in requests], each),
        VERSION: _texts([one.version for one in requests], each),
        STEP: _numbers(torch.tensor([one.step for one in requests]).repeat_interleave(each)),
    }
    for head in requests[0].scores:
        values = np.concatenate([np.asarray(one.scores[head], np.float32) for one in requests])
        about[SCORE + head] = _numbers(torch.from_numpy(values))
    if taken := about.keys() & columns.keys():
        raise DataError(
            f"cannot log served features: {min(taken)!r} is a column of the log and the name of a feature; "
            "rename the feature"
        )
    return Records(len(batch), {**about, **columns}, complete=True)


def feature_columns(batch: Batch) -> dict[str, RaggedTensor]:
    """Return the features of a batch as columns of the log."""
    size, ids = len(batch), batch.ids
    everyone = torch.zeros(size, dtype=torch.int64)
    columns: dict[str, RaggedTensor] = {}
    begin = 0
    for name in ids.names:
        column = ids[name]
        end = begin + len(column.flat_values)
        found = {name: column}
        if ids.weights is not None:
            found[name + WEIGHTS] = column.with_flat_values(ids.weights[begin:end])
        begin = end
        for each, one in found.items():  # one row that all examples share is logged with each of them
            columns[each] = one if one.nrows == size else take_rows(one, everyone)
    for name, numbers in batch.floats.items():
        columns[name] = _numbers(numbers.expand(size, numbers.shape[1]))
    return columns


def _numbers(values: Tensor) -> RaggedTensor:
    """Return a column of shape (n,) or (n, width)."""
    width = values[0].numel() if len(values) else 1
    return RaggedTensor(values.reshape(-1), torch.arange(len(values) + 1) * width, validate=False)


def _texts(texts: Sequence[str], each: Tensor) -> RaggedTensor:
    """Return a column of texts, each as often as said."""
    column = _single(text_rows([_bytes(text) for text in texts]))
    return take_rows(column, torch.arange(len(texts)).repeat_interleave(each))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # JSON may have half of a character


def _single(texts: RaggedTensor) -> RaggedTensor:
    return RaggedTensor(texts, torch.arange(texts.nrows + 1), validate=False)


@dataclass(frozen=True, kw_only=True)
class ServedSpec(FeatureSpec):
    """Reads the features of a log, as they were served; labels as the spec that it is made of says.

    Examples:
        >>> from monolith.data.served import ServedSpec
        >>> from monolith.feature import FeatureSpec, IdFeature, Label
        >>> raw = FeatureSpec(features={"user": IdFeature(column="name", kind="string")}, labels={})
        >>> ServedSpec.of(raw).columns["user"]  # hashed already
        torch.int64
    """

    TITLE = "the served features"

    made_of: FeatureSpec | None = None
    """The spec by which the requests were read."""

    @classmethod
    def of(cls, spec: FeatureSpec) -> ServedSpec:
        """Return what reads a log of requests that were read by `spec`."""
        given: dict[str, Any] = {one.name: getattr(spec, one.name) for one in fields(FeatureSpec)}
        # Times of histories were read when they were served; they keep their name in a batch.
        given["features"] = {
            name: replace(
                one, with_=tuple(REQ_TIME if each == spec.event_time else each for each in one.with_)
            )
            if isinstance(one, HistoryFeature)
            else one
            for name, one in spec.features.items()
        }
        made = cls(
            **{**given, "event_time": REQ_TIME, "event_time_unit": "s", "optional": (), "made_of": spec}
        )
        optional = [name for name in spec.optional if name in made.targets]
        # A log may be of users without a history alone.
        optional += [each.name for lists in made.histories.values() for each in lists]
        optional += [name for name in made.inputs if name.endswith((GAP, WEIGHTS))]
        for name, one in spec.features.items():
            # A column that the data may lack may be without values in a whole log, and so not be there.
            parts = one.of if isinstance(one, CrossFeature) else (name,)
            columns = {getattr(spec.features[part], "column", None) or part for part in parts}
            if not columns.isdisjoint(spec.optional):
                optional.append(name)
        return replace(made, optional=tuple(dict.fromkeys(optional)))

    @cached_property
    def inputs(self) -> dict[str, torch.dtype]:
        found: dict[str, torch.dtype] = dict.fromkeys(self.ids, torch.int64)
        for name, one in self.features.items():
            if isinstance(one, IdFeature) and one.weights is not None:
                found[name + WEIGHTS] = torch.float32
        found |= dict.fromkeys(self.floats, torch.float32)
        return {**found, REQ_TIME: TIME}

    @property
    def raw(self) -> FeatureSpec:
        return self if self.made_of is None else self.made_of

    @property
    def source_columns(self) -> dict[str, torch.dtype]:
        return self.columns  # histories were made before they were logged

    @property
    def to_learn(self) -> tuple[str, ...]:
        return ()  # means and boundaries were applied before the features were logged

    @cached_property
    def reader(self) -> RawReader:
        return _ServedReader(self)


class _ServedReader(RawReader):
    """Makes batches of features that are IDs and floats already. Safe from any thread."""

    def __init__(self, spec: ServedSpec) -> None:
        super().__init__(spec)
        self._served = spec

    def read(self, records: RawColumns) -> Reading:
        spec = self._served
        found = Reading(records.size, group=spec.group)
        self._event_times(records, found)
        for name in spec.ids:
            ids = self._raw(records, name, torch.int64)
            if ids.dtype is not torch.int64:
                raise DataError(
                    f"served features: column {name!r} must have IDs, int64, got {ids.dtype}. Is this a log "
                    "of served features? Leave data.served out for raw columns."
                )
            self._put(name, ids, found)
            if name + WEIGHTS in spec.inputs:
                self._weights(name, ids, self._raw(records, name + WEIGHTS, torch.float32), found)
        for name, width in spec.floats.items():
            self._served_floats(name, width, self._raw(records, name, torch.float32), found)
        for task, label in spec.labels.items():
            self._label(task, label, records, found)
        return found

    def _weights(self, name: str, ids: RaggedTensor, weights: RaggedTensor, found: Reading) -> None:
        wrong = ids.row_lengths() != weights.row_lengths()
        reason = f"served features: {name!r} has another number of IDs than of weights"
        found.blame(wrong.nonzero().squeeze(1), ids.nrows, lambda _: reason)
        found.weights[name] = weights.flat_values.to(torch.float32)

    def _served_floats(self, name: str, width: int, raw: RaggedTensor, found: Reading) -> None:
        numbers = numbers_of(name, name, raw, None, found)
        lengths = numbers.row_lengths()
        found.blame(
            (lengths != width).nonzero().squeeze(1),
            numbers.nrows,
            lambda row: BadReason(
                f"served features: {name!r} has … numbers, not {width}", str(int(lengths[row]))
            ),
        )
        values = numbers.with_flat_values(numbers.flat_values.to(torch.float32)).to_padded(width)
        found.floats[name] = values.expand(found.size, width)
