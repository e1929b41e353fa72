"""How a run is evaluated while it trains, as settings; `evaluating` obeys them.

Nothing here needs torch: a command reads settings before it decides whether to train.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from monolith.errors import ConfigError

MORE_IS_BETTER = ("auc", "gauc", "recall", "ndcg", "hit_rate", "mrr")
LESS_IS_BETTER = ("loss", "log_loss", "ne", "squared_loss", "absolute_loss", "rmse", "mae")
LOSS = "loss"
"""The metric of every evaluation: the mean loss of its examples."""
HEADLINES = ("auc", "rmse")
"""How the names of metrics end that a line of text has room for: the first of a class, and of a number."""
_BY_DEFAULT = ({"auc", "log_loss", "calibration"}, {"rmse", "mae", "calibration"})
"""The metrics that a label has by default: of a class, and of a number."""


def headlines(metrics: Iterable[str]) -> list[str]:
    """Return the metrics that a line of text shows, without the loss.

    Of a label with metrics that labels have by default, these are AUC or RMSE. Other metrics that the task
    chose for a label, and measures of the task's own, which belong to no label, are all shown.
    """
    names = [name for name in metrics if name != LOSS]
    kinds: dict[str, set[str]] = {}
    for name in names:
        label, _, kind = name.rpartition("/")
        kinds.setdefault(label, set()).add(kind)
    usual = {
        label
        for label, known in kinds.items()
        if known & set(HEADLINES) and any(known - {"gauc"} <= one for one in _BY_DEFAULT)
    }
    return [name for name in names if name.rpartition("/")[0] not in usual or name.endswith(HEADLINES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """How often a run is evaluated while it trains, on dataset(Mode.EVALUATE), and what follows from it.

    Off unless every_steps, every_epochs or every is given. Training pauses meanwhile; `monolith evaluate
    --follow` is another process that evaluates checkpoints while the run trains.

    Examples:
        >>> from monolith import EvaluateConfig, TrainConfig
        >>> evaluate = EvaluateConfig(every_steps=1000, metric="auc", patience=3)
        >>> TrainConfig(model_dir="run", evaluate=evaluate).evaluate.keep_best
        True
    """

    every_steps: int | None = None
    """How many steps there are between evaluations of the model, on the task's evaluation data; None counts
    none."""
    every_epochs: int | None = None
    """How many epochs (train.epochs) there are between evaluations. They compare the model at the same place
    of each epoch."""
    every: timedelta | None = None
    """How much time there is between evaluations of the model, such as 10m."""
    steps: int | None = None
    """How many batches each evaluation reads; None reads all there are."""
    metric: str | None = None
    """The metric by which evaluations are compared, such as click/auc or auc; None takes the first AUC or
    RMSE, or the loss if there is none."""
    mode: Literal["max", "min"] | None = None
    """Whether more or less of the metric is better; None knows it of the metrics there are, but for
    calibration."""
    min_delta: float = 0.0
    """By how much the metric must be better than the best one before, to count as better."""
    patience: int | None = None
    """How many evaluations in a row may be no better than the best before the run stops early; None never
    stops for that. With several epochs a run does not stop within one epoch of the best: metrics rise and
    fall within an epoch, with the order of the data."""
    keep_best: bool = True
    """Whether the best evaluation is saved as a checkpoint that is kept, and called best in `--checkpoint
    best`; needs a model_dir."""
    at_end: bool = True
    """Whether the model is evaluated once more at the end of a run that is not interrupted."""

    def __post_init__(self) -> None:
        given_by = [
            name for name in ("every_steps", "every_epochs", "every") if getattr(self, name) is not None
        ]
        if len(given_by) > 1:
            raise ConfigError(f"evaluate: {' and '.join(given_by)} are both given; give one of them")
        for name in ("every_steps", "every_epochs", "steps", "patience"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(f"evaluate: {name} must be at least 1, or None, got {given}")
        if self.every is not None and self.every <= timedelta(0):
            raise ConfigError(f"evaluate: every must be above 0, got {self.every}")
        if self.min_delta < 0:
            raise ConfigError(f"evaluate: min_delta must not be negative, got {self.min_delta}")
        if self.patience is not None and not self.enabled:
            raise ConfigError(
                "evaluate: patience counts evaluations, and there are none; set every_steps, every_epochs "
                "or every"
            )
        if self.metric is not None:
            self.direction(self.metric)  # or an error, before anything is trained

    @property
    def enabled(self) -> bool:
        return any(one is not None for one in (self.every_steps, self.every_epochs, self.every))

    def direction(self, metric: str) -> Literal["max", "min"]:
        """Return whether more or less of a metric is better.

        Raises:
            ConfigError: It is not known.
        """
        if self.mode is not None:
            return self.mode
        kind = metric.rpartition("/")[2].partition("@")[0]
        if kind in MORE_IS_BETTER:
            return "max"
        if kind in LESS_IS_BETTER:
            return "min"
        raise ConfigError(
            f"evaluate: whether more or less of {metric!r} is better is not known; set mode to max or min"
        )
