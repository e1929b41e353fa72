"""The settings of `DenseCache`, apart from it because a config file is read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """When a worker fetches dense weights from parameter servers, and when it pushes their gradients.

    With neither setting a step waits for the answer to its push, which contains the new weights.
    """

    prefetch: bool = False
    """Whether dense weights are fetched while a step is computed, so that a step uses the weights of the
    previous step. With postpush they are in the answers to earlier pushes."""
    postpush: bool = False
    """Whether dense gradients are pushed while the next step is computed. Saves wait for all pushes, so
    nothing is lost."""
    max_staleness: int = 1
    """How many of its own steps a worker's dense weights may lack at most; a step that would lack more waits.
    Above 1, the result of a run depends on timing."""

    def __post_init__(self) -> None:
        if self.max_staleness < 1:
            raise ConfigError(f"dense: max_staleness must be at least 1, got {self.max_staleness}")

    @property
    def in_background(self) -> bool:
        """Whether anything is fetched or pushed while steps are computed."""
        return self.prefetch or self.postpush

    @property
    def depends_on_time(self) -> bool:
        """Whether a worker's weights depend on how fast a server answers, even if it is the only worker."""
        return self.in_background and (self.max_staleness > 1 or not self.prefetch)
