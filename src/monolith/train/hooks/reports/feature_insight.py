"""Feature insight: what each feature brings to a layer, written while a model trains.

The layer's product is cut at the borders of the features (`monolith.nn.feature_insight`); its
pieces and the label go to an event file, from which `monolith insight` tells which features
matter. Only steps that are written are watched, so the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from monolith.errors import ConfigError
from monolith.filesystem import join
from monolith.nn import Dense, feature_insight, watch_segments
from monolith.observe.summaries import Groups, TensorSummary, insight_data
from monolith.observe.summary_files import SummaryWriter
from monolith.train.hook import Every, Hook, Run, StepResult

FOLDER = "summaries/insight"
"""Below the model's folder; apart from other summaries, since TensorBoard follows one file at a time."""


def feature_insight_data(
    inputs: Tensor,
    segment_names: Sequence[str],
    segment_sizes: Sequence[int],
    weight: Tensor | None = None,
    *,
    group_info: Groups | None = None,
    label: Tensor | None = None,
    description: str | None = None,
    name: str | None = None,
) -> TensorSummary:
    """Return the summary of what each segment of `inputs` contributes.

    Args:
        inputs: float of shape (examples, sum of the sizes).
        weight: float of shape (sum of the sizes, k): the inputs are multiplied by it, segment by segment.
            With a label that leaves k columns to each segment; without, one: the sum of their squares.
        label: Of shape (examples,) or (examples, labels), written beside the segments.

    Raises:
        ConfigError: There are no segments, or lengths do not agree.
    """
    if not segment_names or len(segment_names) != len(segment_sizes):
        raise ConfigError(
            "feature insight needs as many segment_sizes as segment_names and at least one, "
            f"got {len(segment_sizes)} and {len(segment_names)}"
        )
    values, sizes = inputs.detach(), list(segment_sizes)
    if weight is not None:
        values = feature_insight(values, weight.detach(), sizes, aggregate=label is None)
        sizes = [1 if label is None else weight.shape[1]] * len(sizes)
    return insight_data(
        values, segment_names, sizes, group_info=group_info, label=label, description=description, name=name
    )


def label_of(result: StepResult, label: str | None, most: int) -> Tensor | None:
    """Return the label of the first `most` examples of a step; None where none is asked for.

    Raises:
        ConfigError: The batches have no such label.
    """
    if label is None:
        return None
    if label not in result.batch.labels:
        there = ", ".join(result.batch.labels) or "none"
        raise ConfigError(f"train: insight_label: the batches have no label {label!r}; they have {there}")
    return result.batch.labels[label][:most]


class FeatureInsightHook(Hook):
    """Writes what each feature brings to a layer, every `every_steps` steps.

    Args:
        layer: The first layer over all features: `model.dense.first` of a ready model, `mlp.first` of an MLP.
        segments: Feature to its width, in the order in which they lie in the layer's input.
        label: Name of the label to write beside them; None writes only how large the contributions are.
        max_rows: Examples of a batch that are written; one takes 4 bytes a feature, and with a label
            that many for each output of the layer.
    """

    def __init__(
        self,
        layer: Dense,
        segments: Mapping[str, int],
        *,
        label: str | None = None,
        every_steps: int = 1000,
        max_rows: int = 512,
        group_info: Groups | None = None,
        name: str | None = None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"feature insight: max_rows must be at least 1, got {max_rows}")
        self._layer = layer
        self._segments = dict(segments)
        self._label = label
        self._every = Every(every_steps, "feature insight: every_steps")
        self._most = max_rows
        self._groups = group_info
        self._name = name
        self._writer: SummaryWriter | None = None
        self._watch: RemovableHandle | None = None
        self._parts: Tensor | None = None

    def after_create(self, run: Run) -> None:
        if run.model_dir and self._writer is None:
            self._writer = SummaryWriter(join(run.model_dir, FOLDER))
            self._writer.start(run.step)
        self._every.begin(run.step)

    def before_step(self, run: Run) -> None:
        if self._writer is not None and self._every.crossed(run.step + 1):
            self._watch = watch_segments(
                self._layer, list(self._segments.values()), self._keep, aggregate=self._label is None
            )

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if self._watch is None:
            return
        self._unwatch()
        parts, self._parts = self._parts, None
        # A layer that did not run in this step, or not on one row for each example, has nothing to tell.
        if self._writer is None or parts is None or len(parts) != result.examples:
            return
        count = len(self._segments)
        label = label_of(result, self._label, self._most)
        summary = insight_data(
            parts[: self._most],
            list(self._segments),
            [parts.shape[1] // count] * count,
            group_info=self._groups,
            label=label,
            name=self._name,
        )
        self._writer.tensor(summary, result.step)

    def close(self) -> None:
        self._unwatch()
        if self._writer is not None:
            self._writer.close()

    def _keep(self, parts: Tensor) -> None:
        self._parts = parts

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
