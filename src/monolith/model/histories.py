"""Histories as models of sequences read them: which features are steps, and when each step happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, FeatureError
from monolith.feature import Batch, Each, FeatureSpec, HistoryFeature
from monolith.feature.cuda import DeviceIds, PaddedSteps
from monolith.model.collection import PreparedBatch
from monolith.model.features import FeatureSet
from monolith.model.ready import ModelInput
from monolith.nn import GRUEncoder
from monolith.nn.layers.jagged_attention import sequence_of
from monolith.tensors import RaggedTensor

TIME = ".time"
"""Behind the name of a history: the feature of its times, in Unix seconds."""


class StepFeatures(NamedTuple):
    """The features of a sequence."""

    history: str
    """The steps."""
    item: str
    """What they are steps of: the feature whose rows they read."""
    companions: tuple[str, ...]
    """What is kept along with each step."""

    def read(self, layouts: Mapping[str, RaggedTensor]) -> RaggedTensor:
        """Return the vector of each step: that of its item, with those of its companions added.

        Args:
            layouts: Values of shape (steps, dim) by feature.

        Raises:
            FeatureError: A companion has another number of steps.
        """
        history = layouts[self.history]
        values = history.flat_values
        for name in self.companions:
            more = layouts[name].flat_values
            if more.shape != values.shape:
                raise FeatureError(
                    f"{name!r} has {len(more)} steps, and {self.history!r} {len(values)}: a step has one of "
                    "both"
                )
            values = values + more
        return RaggedTensor(values, history.row_splits, validate=False)


def step_features(model: str, features: FeatureSet, given: str | None, dim: int) -> StepFeatures:
    """Return the features of a model's sequence.

    Args:
        model: The name of the model's class, for errors.
        given: The history; None finds the only one.
        dim: Width of a step.

    Raises:
        ConfigError: There is no history, or several, or its features do not fit together.
    """
    kept = [name for name in features.names if isinstance(features[name].combiner, Each)]
    found = [name for name in kept if not any(name.startswith(f"{other}.") for other in kept)]
    if given is not None and given not in kept:
        raise ConfigError(
            f"{model}: history: {given!r} is no feature of which each ID is kept; there "
            f"{'are ' + ', '.join(found) if found else 'is none'}"
        )
    if given is None and not found:
        raise ConfigError(f"{model}: needs a history: a HistoryFeature, or a Feature with the combiner Each")
    if given is None and len(found) > 1:
        raise ConfigError(f"{model}: features {', '.join(found)} are histories; name one as history")
    history = found[0] if given is None else given
    item = features[history].shares
    if item is None:
        raise ConfigError(
            f"{model}: history {history!r} must share the rows of the feature whose values it lists, such as "
            "the item"
        )
    companions = tuple(name for name in kept if name.startswith(f"{history}."))
    widths = features.widths(dim)
    for other in (item, history, *companions):
        if widths[other] != dim:
            raise ConfigError(
                f"{model}: feature {other!r} has dim {widths[other]}, and a step has {dim}: their vectors "
                "are added; leave its dim out, or set the model's"
            )
    return StepFeatures(history, item, companions)


def max_length_of(said: object, given: int | None) -> int:
    """Return the most steps of a history: as given, or as its `HistoryFeature` says."""
    if given is not None:
        return given
    return said.max if isinstance(said, HistoryFeature) else 200


def has_times(spec: FeatureSpec, history: str | None) -> bool:
    """Whether histories of a spec have times: the one named, or all."""
    found = [
        one
        for name, one in spec.features.items()
        if isinstance(one, HistoryFeature) and history in (None, name)
    ]
    return all(spec.event_time in one.with_ for one in found)


def padded_steps(encoder: nn.Module, steps: StepFeatures, read: Sequence[str] = ()) -> PaddedSteps | str:
    """Return what a model reads of histories that are padded for a captured step; or why it takes none.

    Args:
        read: Features whose IDs it reads, besides times.
    """
    if isinstance(encoder, GRUEncoder):
        return "a GRU has a launch for each step of the longest history, which the host must know"
    return PaddedSteps((steps.history, *steps.companions, steps.history + TIME), tuple(read))


def step_times(batch: ModelInput, history: str, row_splits: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return when each step of a history happened, and when its state is asked for.

    A state is asked for when the next step happens; the last one at the event time of the example, or if the
    example has none, when it happened itself.

    Returns:
        Two int64 tensors of shape (steps,), on the device of `row_splits`; None twice without times.
    """
    if isinstance(batch, PreparedBatch):
        return None, None
    ids = batch.ids if isinstance(batch, Batch) else batch
    event_times = None
    if isinstance(ids, Mapping):
        found = ids.get(history + TIME)
    else:
        found = ids[history + TIME] if history + TIME in ids.names else None
        event_times = ids.event_times
    if not isinstance(found, RaggedTensor):
        return None, None
    times = found.flat_values.to(row_splits.device)
    steps = times.shape[0]
    sequence = sequence_of(row_splits, steps)
    is_last = torch.arange(1, steps + 1, device=times.device) == row_splits[sequence + 1]
    last = times
    if event_times is not None and event_times.shape[0] == row_splits.shape[0] - 1:
        last = event_times.to(times.device)[sequence]
        last = torch.where(last > 0, last, times)
    return times, torch.where(is_last, last, times.roll(-1))


def is_captured(batch: ModelInput) -> bool:
    """Return whether a batch stands for all batches of a shape, in a step that is captured; see `StepGraph`.

    Histories are padded then, sizes must not depend on values, and the host must not look at values.
    """
    return isinstance(batch.ids if isinstance(batch, Batch) else batch, DeviceIds)


def graph_numbers(batch: ModelInput, max_length: int) -> Tensor | None:
    """Return how far histories are padded, 0, 1 and so on; None if the host may look at lengths.

    While a graph of torch.export is traced, a stand-in for the IDs of all batches has them; see
    `monolith.serve.tracing`. A step that is captured for a GPU has kernels, which need none. An emulated
    device has no kernels: it pads to the most steps that a history may have.

    Args:
        max_length: The most steps of a history.
    """
    ids = batch.ids if isinstance(batch, Batch) else batch
    if isinstance(ids, DeviceIds):
        where = ids[next(iter(ids.there))].row_splits.device
        return None if where.type == "cuda" else torch.arange(max_length, device=where)
    found: Tensor | None = getattr(ids, "numbers", None)
    return found


class EncodedHistories(NamedTuple):
    """Histories that were encoded before, and the items of each; see `monolith.serve.histories`."""

    encoded: Tensor
    """What `SequenceRanker.encode` returned, float of shape (steps, floats)."""
    items: Tensor
    """int64 of shape (histories, items): the examples of each history; behind the end of a row, any."""
    places: Tensor
    """int64 of shape (examples,): where each example is among `items`, row after row."""


def encoded_histories(batch: ModelInput) -> EncodedHistories | None:
    """Return the encoded histories of a batch, as `graph_numbers`; None if no graph over them is traced."""
    ids = batch.ids if isinstance(batch, Batch) else batch
    found: EncodedHistories | None = getattr(ids, "encoded", None)
    return found
