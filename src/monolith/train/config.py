"""How a task is trained: where to, how long, how often saved, what restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from monolith.checkpoint import CustomRestore, RestoreOptions
from monolith.errors import ConfigError
from monolith.train.expiring import ExpiryConfig
from monolith.train.hooks import AlertConfig, SaveConfig, TideWindow
from monolith.train.hooks.config import HooksConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepConfig:
    """Which checkpoints are kept."""

    max_to_keep: int = 10
    """How many, besides exempt ones; 0 keeps all."""
    every: timedelta | None = timedelta(hours=24)
    """Of those that leave, one per period is kept for good."""
    full_every: int = 1
    """Every so many checkpoints a full one; those between hold only the rows that changed."""
    evict: bool = False
    """Drop expired rows before each save, as `expiry` says; a save by itself writes all rows there are."""

    def __post_init__(self) -> None:
        if self.max_to_keep < 0:
            raise ConfigError(f"keep: max_to_keep must be 0 or more, got {self.max_to_keep}")
        if self.full_every < 1:
            raise ConfigError(f"keep: full_every must be at least 1, got {self.full_every}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreConfig:
    """What a run starts from. A model_dir with a checkpoint goes on from there, whatever stands here."""

    dir: str | None = None
    """Another model_dir to start from, where this one has no checkpoint of its own. Nothing is copied."""
    checkpoint: str | None = None
    """Which of the listed checkpoints, such as model.ckpt-30; in training it is taken once per model_dir. One
    that is not listed is passed over with a warning, unless it is `required`."""
    required: bool = False
    """Whether `checkpoint` may be any that is on disk and sound, by name, step or prefix, and ends the run
    with an error where there is none; training goes back to each once. --restore-checkpoint sets it."""
    restart_data: bool = False
    """With `dir`: begin with the data of this run, instead of going on where that one stood."""
    optimizer_state: Literal["keep", "reset", "auto"] = "keep"
    """"auto" starts the state of rows anew where their optimizer changed."""
    strict: bool = True
    """Whether a table or variable that the checkpoint lacks is an error."""
    alias_map: Mapping[str, str] | None = None
    """Dense variable to the name it was saved under."""
    auto_alias: bool = True
    """Guess the old names of variables that the checkpoint does not have."""
    clear_nn: bool = False
    """Start dense variables anew, once; rows are restored."""
    continue_training: bool = False
    """With clear_nn, go on with the step of the checkpoint."""

    def options(self, model_dir: str) -> RestoreOptions:
        return RestoreOptions(
            optimizer_state=self.optimizer_state,
            strict=self.strict,
            custom=CustomRestore(
                alias_map=None if self.alias_map is None else dict(self.alias_map),
                clear_nn=self.clear_nn,
                continue_training=self.continue_training,
                auto_alias=self.auto_alias,
            ),
            model_dir=model_dir,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One run, as each process of it sees it."""

    model_dir: str = ""
    """Where checkpoints, summaries and the run's manifest go; "" keeps nothing."""
    steps: int | None = None
    """End after so many more steps."""
    max_steps: int | None = None
    """End when the model has taken so many steps in all its runs."""
    max_time: timedelta | None = None
    """End after so long."""
    seed: int = 0
    """The same seed gives the same first weights and random numbers."""
    deterministic: bool = False
    """Let nothing depend on time: the same data gives the same bits, also through kills and restarts.
    Saves are then waited for, and counted in steps."""
    prefetch: int = 1
    """Batches whose rows are looked up ahead; 0 for none."""
    async_push: bool = True
    """Update rows while the next batch is computed."""
    evict_every_steps: int | None = None
    """Drop expired rows that often, as `expiry` says; None only where `keep.evict` asks for it."""
    expiry: ExpiryConfig = field(default_factory=ExpiryConfig)
    save: SaveConfig = field(default_factory=lambda: SaveConfig(steps=1000, asynchronous=True))
    dense_save: SaveConfig | None = None
    """How often the dense weights alone are saved too, in `dense_only` below model_dir; None never."""
    keep: KeepConfig = field(default_factory=KeepConfig)
    restore: RestoreConfig = field(default_factory=RestoreConfig)
    tide: TideWindow | None = None
    """The daily hours, UTC, in which to train; outside of them the run saves and ends."""
    alert: AlertConfig | None = None
    """What to do about a loss that is NaN or explodes; None does not look."""
    max_skipped_in_a_row: int = 10
    """How many batches in a row may be skipped because their loss or a gradient is NaN or infinite; one more
    ends the run before it saves. A skipped batch counts as read, and neither as a step nor as trained on."""
    metric_window: int | timedelta = 100_000
    """Metrics are reported for every so many examples, or so much event time."""
    hooks: HooksConfig = field(default_factory=HooksConfig)
    operator_files: bool = False
    """Obey files in model_dir: dump_<step>, stop_<step> and limit_req_time."""
    insight_every_steps: int | None = None
    """How often what each feature brings is written, for `monolith insight`; None never."""
    summary_every_steps: int | None = 100
    """How often TensorBoard summaries are written, where there is a model_dir; None writes none."""
    report_every: timedelta = timedelta(seconds=30)
    """How often a line is logged, where there is no terminal."""
    idle_after: timedelta = timedelta(seconds=1)
    """When a stream has had nothing for so long, rows are updated without waiting for it."""

    def __post_init__(self) -> None:
        for name in ("steps", "max_steps", "evict_every_steps", "summary_every_steps"):
            given = getattr(self, name)
            if given is not None and given < (1 if name.endswith("every_steps") else 0):
                raise ConfigError(f"train: {name} must be above 0, or None, got {given}")
        if self.insight_every_steps is not None and self.insight_every_steps < 1:
            raise ConfigError(f"train: insight_every_steps must be above 0, got {self.insight_every_steps}")
        if self.max_skipped_in_a_row < 0:
            raise ConfigError(
                f"train: max_skipped_in_a_row must be 0 or more, got {self.max_skipped_in_a_row}"
            )
        if self.prefetch < 0:
            raise ConfigError(f"train: prefetch must be 0 or more, got {self.prefetch}")
        if self.deterministic and self.save.secs is not None:
            raise ConfigError(
                "train: a deterministic run saves every so many steps, not seconds: set save.steps, "
                "or deterministic=False"
            )

    @property
    def saves_beside(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.save.asynchronous and not self.deterministic
