"""Batches by a feature spec: raw records become what a model reads, and bad ones are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monolith.data.bad_values import BadRecords, BadTally
from monolith.data.format import BadRecord
from monolith.data.kept import Kept
from monolith.data.records import ColumnCheck, Records
from monolith.feature import Batch, FeatureSpec


class SpecBatchMaker:
    """Makes batches of a stream of records; see `ColumnCheck` for columns that the stream does not have.

    A record that cannot be read as the spec says (a word where a number should be, no label, a list of
    another length than its weights) is left out and counted; see `FeatureSpec.max_bad`.

    Args:
        reject: Given bad records, with their values as JSON.
        resumed: Whether the records are what is left of a stream; its end then says nothing.
        kept: Takes raw columns along with each batch.
        first_empty: As of `BadRecords`.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        reject: Callable[[Sequence[BadRecord]], None],
        *,
        resumed: bool = False,
        kept: Kept | None = None,
        first_empty: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._kept = kept
        self._resumed = resumed
        self._check = _check_of(spec)
        self._bad = BadRecords(
            spec.max_bad,
            reject,
            what="cannot be read as the features say",
            advice="Mend the data, change the features, or allow more with examples.max_bad of the config, "
            "which is max_bad of a FeatureSpec. Where a task can do without a label, name its column in "
            "examples.optional.",
            first_empty=first_empty,
            told=spec.reader.told,
        )

    @property
    def tally(self) -> BadTally:
        """Why records were left out."""
        return self._bad.tally

    def __call__(self, records: Records) -> Batch | None:
        """Return a batch of the records that are good; None where all are bad.

        Raises:
            DataError: A column is missing, or of another type than the spec says.
            TooManyBadRecordsError: More are bad than are allowed.
        """
        if records.complete:
            _check_of(self._spec).look(records)  # one file of a table may lack what the one before has
        else:
            self._check.look(records)
        self._bad.see(len(records))
        reading = self._spec.reader.read(records)
        if reading.bad:
            records = self._bad.leave_out(records, dict(sorted(reading.bad.items())), reading.no_label)
            if not len(records):
                return None
            reading = self._spec.reader.read(records)
        batch = self._spec.reader.batch(reading)
        return batch if self._kept is None else self._kept.beside(batch, records)

    def end(self) -> None:
        """Hear that there are no more.

        Raises:
            DataError: None of the records had a column that is not optional.
            TooManyBadRecordsError: Too many of all of them were bad.
        """
        self._bad.judge(at_end=True)
        self._spec.reader.empty.tell()
        if not self._resumed:
            self._check.end()


def _check_of(spec: FeatureSpec) -> ColumnCheck:
    return ColumnCheck("features", spec.required, "FeatureSpec(optional=[{}])")
