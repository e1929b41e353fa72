"""Deep insight: what was predicted for single examples, for people who look at single examples.

A sample of each batch becomes messages, one JSON object an example. Version 1 tells of one
target; version 2, when targets are named, of several, and of further fields of the example:

    {"model_name": "m", "target": "ctr_head", "uid": 7, "req_time": 1700000000, "label": 1.0,
     "pred": 0.3, "sample_rate": 1.0}
    {"model_name": "m", "uid": 7, "req_time": 1700000000, "targets": ["click", "like"],
     "labels": [1.0, 0.0], "preds": [0.3, 0.1], "sample_rates": [1.0, 1.0],
     "extra_float": {"price": 2.5}, "extra_int": {"gid": 9}, "extra_str": {"city": "Bonn"}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.train.hook import Hook, Run, StepResult
from monolith.train.hooks.reports.metric_sinks import MessageSink

_log = logging.getLogger(__name__)

SAMPLE_RATIO = 0.01
TARGET = "ctr_head"
UID = "uid"
REQ_TIME = "req_time"
SAMPLE_RATE = "sample_rate"

Column = Tensor | Sequence[str]
"""One value for each example: float or int64 of shape (n,), or texts."""
ReadField = Callable[[Batch, str], Column | None]
"""Reads a field of a batch; None where the batch does not have it."""


def read_field(batch: Batch, name: str) -> Column | None:
    """Return the first id of a feature, 0 where there is none, or the first number of a float feature."""
    if name in batch.ids.names:
        ids = batch.ids[name]
        starts, lengths = ids.row_splits[:-1], ids.row_splits.diff()
        first = torch.zeros(ids.nrows, dtype=torch.int64)
        first[lengths > 0] = ids.flat_values[starts[lengths > 0]]
        return first if len(first) == len(batch) else first.expand(len(batch))
    if name in batch.floats:
        return batch.floats[name].reshape(len(batch), -1)[:, 0]
    return None


def messages_v1(
    *,
    model_name: str,
    target: str = TARGET,
    uids: Tensor,
    req_times: Tensor,
    labels: Tensor,
    preds: Tensor,
    sample_rates: Tensor | None = None,
) -> list[str]:
    """Return a message for each example; all tensors have shape (n,), rates are 1 by default."""
    rates = torch.ones(len(uids)) if sample_rates is None else sample_rates
    columns = _same_length(
        {UID: uids, REQ_TIME: req_times, "label": labels, "pred": preds, SAMPLE_RATE: rates}
    )
    return [
        json.dumps({"model_name": model_name, "target": target, **dict(zip(columns, row, strict=True))})
        for row in zip(*columns.values(), strict=True)
    ]


def messages_v2(
    *,
    model_name: str,
    targets: Sequence[str],
    req_times: Tensor,
    labels: Tensor,
    preds: Tensor,
    sample_rates: Tensor | None = None,
    fields: Mapping[str, Column],
) -> list[str]:
    """Return a message for each example.

    Args:
        labels: Of shape (targets, n), as are `preds` and `sample_rates`.
        fields: Further fields, sorted by what they are into `extra_float`, `extra_int` and `extra_str`.
            `uid` must be among them and stands by itself.
    """
    if UID not in fields:
        raise ConfigError(f"deep insight: the field {UID!r} is mandatory, got {sorted(fields)}")
    rates = torch.ones_like(preds) if sample_rates is None else sample_rates
    for name, tensor in (("labels", labels), ("preds", preds), ("sample_rates", rates)):
        if tensor.shape != (len(targets), len(req_times)):
            raise ConfigError(
                f"deep insight: {name} must have shape ({len(targets)}, {len(req_times)}), "
                f"got {tuple(tensor.shape)}"
            )
    columns = _same_length({**fields, REQ_TIME: req_times})
    kinds: dict[str, list[str]] = {"extra_float": [], "extra_int": [], "extra_str": []}
    for name, column in fields.items():
        if name != UID:
            kinds[_kind_of(column)].append(name)
    by_target = {
        "labels": labels.t().tolist(),
        "preds": preds.t().tolist(),
        "sample_rates": rates.t().tolist(),
    }
    return [
        json.dumps(
            {
                "model_name": model_name,
                "uid": columns[UID][row],
                "req_time": columns[REQ_TIME][row],
                "targets": list(targets),
                **{name: values[row] for name, values in by_target.items()},
                **{kind: {name: columns[name][row] for name in names} for kind, names in kinds.items()},
            }
        )
        for row in range(len(req_times))
    ]


class DeepInsightHook(Hook):
    """Hands messages about a sample of the examples to sinks, after each step.

    Without a sink, or for batches without the time of the request, it does nothing.

    Args:
        target: Of version 1: the head to tell of; a model with a single head may call it otherwise.
        targets: Heads to tell of by version 2; none means version 1.
        extra_fields: Further fields for version 2; `uid` always comes along.
        read: Reads a field of a batch, for fields that are not simply features.
        generator: Chooses the sample.
    """

    def __init__(
        self,
        sinks: Sequence[MessageSink],
        *,
        model_name: str,
        sample_ratio: float = SAMPLE_RATIO,
        target: str = TARGET,
        targets: Sequence[str] = (),
        extra_fields: Sequence[str] = (),
        read: ReadField = read_field,
        generator: torch.Generator | None = None,
    ) -> None:
        if not 0 <= sample_ratio <= 1:
            raise ConfigError(f"deep insight: sample_ratio must be from 0 to 1, got {sample_ratio}")
        self._sinks = tuple(sinks)
        self._model_name = model_name
        self._ratio = sample_ratio
        self._target = target
        self._targets = tuple(targets)
        self._fields = tuple(dict.fromkeys((UID, *extra_fields)))
        self._read = read
        self._generator = generator
        self._silent = False

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if not self._sinks or not self._ratio:
            return
        chosen = torch.rand(result.examples, generator=self._generator) < self._ratio
        messages = self.messages(result, chosen.nonzero().flatten())
        if messages:
            for sink in self._sinks:
                sink.put(messages)

    def messages(self, result: StepResult, chosen: Tensor) -> list[str]:
        """Return the messages about the examples at these positions of a step's batch."""
        batch = result.batch
        req_times = self._read(batch, REQ_TIME)
        if req_times is None:
            if not self._silent:
                _log.warning("deep insight is off: the batches have no feature %r", REQ_TIME)
                self._silent = True
            return []
        times = _take(_tensor(REQ_TIME, req_times), chosen)
        heads = self._targets or (self._only_head(result),)
        labels = torch.stack([_take(batch.labels[head], chosen) for head in heads])
        preds = torch.stack([_take(result.predictions[head], chosen) for head in heads])
        rate = self._read(batch, SAMPLE_RATE)
        rates = None if rate is None else _take(_tensor(SAMPLE_RATE, rate), chosen).expand_as(preds)
        fields = {name: _some(self._field(batch, name), chosen) for name in self._fields}
        if self._targets:
            return messages_v2(
                model_name=self._model_name,
                targets=self._targets,
                req_times=times,
                labels=labels,
                preds=preds,
                sample_rates=rates,
                fields=fields,
            )
        return messages_v1(
            model_name=self._model_name,
            target=self._target,
            uids=_tensor(UID, fields[UID]),
            req_times=times,
            labels=labels[0],
            preds=preds[0],
            sample_rates=None if rates is None else rates[0],
        )

    def _only_head(self, result: StepResult) -> str:
        if self._target in result.predictions:
            return self._target
        if len(result.predictions) == 1:
            return next(iter(result.predictions))
        raise ConfigError(
            f"deep insight: the model has no head {self._target!r} but {', '.join(result.predictions)}; "
            "choose one as target, or several as targets"
        )

    def _field(self, batch: Batch, name: str) -> Column:
        column = self._read(batch, name)
        if column is None:
            raise ConfigError(
                f"deep insight: the batch has no field {name!r}; it has "
                f"{', '.join([*batch.ids.names, *batch.floats])}"
            )
        return column


def _kind_of(column: Column) -> str:
    if not isinstance(column, Tensor):
        return "extra_str"
    return "extra_float" if column.is_floating_point() else "extra_int"


def _same_length(columns: Mapping[str, Column]) -> dict[str, list[float | int | str]]:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"deep insight: fields must have one value for each example, got {lengths}")
    return {name: c.tolist() if isinstance(c, Tensor) else list(c) for name, c in columns.items()}


def _tensor(name: str, column: Column) -> Tensor:
    if not isinstance(column, Tensor):
        raise ConfigError(f"deep insight: the field {name!r} must be numeric, got strings")
    return column


def _take(tensor: Tensor, chosen: Tensor) -> Tensor:
    return tensor.detach().reshape(len(tensor), -1)[:, 0].cpu()[chosen]


def _some(column: Column, chosen: Tensor) -> Column:
    if isinstance(column, Tensor):
        return _take(column, chosen)
    return [column[place] for place in chosen.tolist()]
