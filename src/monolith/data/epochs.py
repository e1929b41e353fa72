"""Reading the same data several times, in another order each time.

A task makes its stream as if it were read once. Whoever runs it says, before the first read, how often it is;
stages pass that on to the source they stand on, which counts epochs in its position. So a restart goes on in
the middle of an epoch, with the very record that comes next in its order.

    stream = task.dataset(Mode.TRAIN)
    read_epochs(stream, Epochs(count=3, seed=7))
"""

from __future__ import annotations

from dataclasses import dataclass

from monolith.data.shuffling import ShuffleConfig
from monolith.errors import ConfigError, NotRepeatableError


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """How often data is read, and in what order where its source has none of its own."""

    count: int
    seed: int = 0
    buffer: int = ShuffleConfig().buffer
    """Records that are mixed with each other at a time; 0 leaves the order."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"epochs: data is read at least once, got {self.count}")

    @property
    def shuffle(self) -> ShuffleConfig | None:
        """How to shuffle; None leaves the order."""
        return ShuffleConfig(seed=self.seed, buffer=self.buffer) if self.buffer else None


def read_epochs(source: object, epochs: Epochs) -> None:
    """Have a source, or a stage on top of one, read its data several times.

    Raises:
        NotRepeatableError: It cannot: a stream that never ends, or a source of a user's own without
            `read_epochs`.
        ConfigError: It was read already, or says itself how often.
    """
    method = getattr(source, "read_epochs", None)
    if method is None:
        raise NotRepeatableError(
            f"{type(source).__name__} cannot be read several times: it has no read_epochs()"
        )
    method(epochs)


def check_unsaid(source: str, own: int | None, *, settled: bool) -> None:
    """Refuse to read a source several times that was read already, or was told itself how often.

    Args:
        own: How often it was told to read.
    """
    if settled:
        raise ConfigError(f"{source}: it was read already, so it is too late to say how often it is")
    if own != 1:
        raise ConfigError(
            f"{source}: it was made with epochs={own}, and the run has train.epochs; leave one of them out"
        )
