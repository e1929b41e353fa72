"""Every: whether it is time again, told by steps that jump.

Where several workers train, the step that one of them sees goes up by more than one: 98, 101, 103.
Who asks whether the step is a multiple of 100 misses it, so ask whether one was crossed.
"""

from __future__ import annotations

from monolith.errors import ConfigError


class Every:
    """Says which multiples of a number of steps were crossed since the last time it was asked.

    Args:
        steps: At least 1.
        what: Who asks, for an error.
    """

    def __init__(self, steps: int, what: str = "every") -> None:
        if steps < 1:
            raise ConfigError(f"{what} must be at least 1, got {steps}")
        self._steps = steps
        self._last: int | None = None

    def begin(self, step: int) -> None:
        """Count from here: what comes after this step is new."""
        self._last = step

    def multiples(self, step: int) -> range:
        """Return the multiples after the last step asked about, up to this one.

        Before the first, and where steps went back to an earlier checkpoint, only this step itself counts.
        """
        last = step - 1 if self._last is None or self._last >= step else self._last
        self._last = step
        return range((last // self._steps + 1) * self._steps, step + 1, self._steps)

    def crossed(self, step: int) -> bool:
        """Whether there is one: at most once for each call, however many there are."""
        return len(self.multiples(step)) > 0
