"""Skipping: a batch whose loss or gradient is not finite is left out, and too many of them end the run.

One NaN that is trained on spreads through the dense weights to every row. So nothing of such a batch
is applied, and it is counted. A record with a NaN in it passes that way. Where the model itself is
spoiled, or learns too fast, every batch is bad: after a few in a row the run ends, before it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from monolith.errors import DivergedError, NonFiniteError, NothingTrainedError
from monolith.feature import Batch

_log = logging.getLogger(__name__)

LINES = 20
"""As many skipped batches have a line in the log; then every hundredth."""


class Skipping:
    """Counts the batches that were skipped.

    Args:
        max_in_a_row: One more ends the run.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self.batches = 0
        """Skipped so far, in all runs."""

    def note(self, cause: NonFiniteError, step: int, batch: Batch) -> None:
        """Count a batch that was not trained on, after `step` steps.

        Raises:
            DivergedError: It was one too many in a row.
        """
        self.batches += 1
        self._in_a_row += 1
        if self._in_a_row > self._max_in_a_row:
            many = "1 batch" if self._in_a_row == 1 else f"{self._in_a_row} batches"
            self._in_a_row = 0
            raise DivergedError(
                f"stopped at step {step} without saving: {many} in a row could not be trained on; in the "
                f"last one, {cause}{_without_labels(batch)}. Lower the learning rate or clip gradients; look "
                "for NaN in the data with `monolith data validate`; or, if the weights are NaN, go back to "
                "an earlier checkpoint with --restore-checkpoint. max_skipped_in_a_row sets how many "
                "are skipped."
            ) from cause
        if self.batches <= LINES or self.batches % 100 == 0:
            _log.warning(
                "skipped a batch of %d examples after step %d: %s%s. Nothing of it was applied; %d so far",
                len(batch),
                step,
                cause,
                _without_labels(batch),
                self.batches,
            )

    def note_trained(self) -> None:
        """Start counting those in a row anew."""
        self._in_a_row = 0


def check_not_all_skipped(batches: int, bad: Mapping[str, int]) -> None:
    """Refuse a run that came to the end of its data without a step because nothing of it could be trained on.

    Args:
        batches: How many were skipped.
        bad: Why records were left out before they were in a batch, and how many for each reason.

    Raises:
        NothingTrainedError: It is such a run.
    """
    reasons = [f"{count:,} records were left out: {reason}" for reason, count in bad.items()]
    if batches:
        reasons.append(f"{batches:,} batches were skipped: their loss or a gradient is NaN or infinite")
    if reasons:
        raise NothingTrainedError(
            f"the run took no step: all of its data was skipped. {'; '.join(reasons)}. Mend the data, "
            "which `monolith data validate` looks at, or name the right columns."
        )


def _without_labels(batch: Batch) -> str:
    """Return which labels are not there, the likeliest cause of a loss of NaN; nothing where all are."""
    empty = {name: int(values.isnan().sum()) for name, values in batch.labels.items()}
    said = [f"{count} have no label {name!r}" for name, count in empty.items() if count]
    if not said:
        return ""
    return f" (of its {len(batch)} examples, {' and '.join(said)}: leave such records out of the data)"
