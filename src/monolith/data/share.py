"""Which share of the data this process reads.

Several workers that train together must not read the same records. A task says nothing of that:
it makes its stream as if it were alone, and whoever runs it says, before the first read, which share
of it to read. Stages and joins pass that on to the sources they stand on.

    stream = task.dataset(Mode.TRAIN)
    share_out(stream, Share(1, 4))      # its FileSource takes every fourth file
"""

from __future__ import annotations

from typing import NamedTuple

from monolith.errors import ConfigError, NotShareableError


class Share(NamedTuple):
    """One of several equal parts of the data."""

    worker: int = 0
    workers: int = 1


def share_out(source: object, share: Share) -> None:
    """Have a source, or a stage on top of one, read one share of its data.

    Raises:
        NotShareableError: It cannot: a source of a user's own without `read_share`.
        ConfigError: There is no such share, or the source was read already.
    """
    read_share = getattr(source, "read_share", None)
    if read_share is None:
        raise NotShareableError(
            f"{type(source).__name__} cannot be shared out among workers: it has no read_share()"
        )
    read_share(share)


class ShareChoice:
    """The share that one source reads. Its arguments win; otherwise whoever runs it chooses; otherwise all.

        open ──tell──► open ──settle, by the first read, position or restore──► settled: nobody chooses

    Args:
        source: Names it in messages.
        worker: The `worker` that the source was given. Alone, it is one of as many workers as there are.
        num_workers: The `num_workers` that it was given.

    Raises:
        ConfigError: There is no such worker.
    """

    def __init__(self, source: str, worker: int | None = None, num_workers: int | None = None) -> None:
        self._source = source
        self._worker = worker
        self._told = Share()
        self._settled: Share | None = None
        self._fixed: Share | None = None
        if num_workers is not None:
            self._fixed = self._checked(Share(worker or 0, num_workers))
        elif worker is not None and worker < 0:
            raise ConfigError(f"{source}: there is no worker {worker}; the first is 0")

    @property
    def is_fixed(self) -> bool:
        """Whether the source was given its share, so that nobody else chooses."""
        return self._fixed is not None

    def tell(self, share: Share) -> None:
        """Choose, as whoever runs the source.

        Raises:
            ConfigError: There is no such share, or the choice is settled.
        """
        if self._settled is not None:
            raise ConfigError(
                f"{self._source}: cannot read share {share.worker} of {share.workers} now, it was read or "
                "asked for its position before; call read_share() first"
            )
        self._told = self._checked(share)

    def settle(self) -> Share:
        """Return the share, which stays the same from now on.

        Raises:
            ConfigError: The source was given a worker, and there are not so many.
        """
        if self._settled is None:
            self._settled = self._choose()
        return self._settled

    def _choose(self) -> Share:
        if self._fixed is not None:
            return self._fixed
        if self._worker is None:
            return self._told
        if self._worker >= self._told.workers:
            raise ConfigError(
                f"{self._source}: there is no worker {self._worker} of {self._told.workers}; give "
                "num_workers with it"
            )
        return Share(self._worker, self._told.workers)

    def _checked(self, share: Share) -> Share:
        if share.workers < 1 or not 0 <= share.worker < share.workers:
            raise ConfigError(f"{self._source}: there is no worker {share.worker} of {share.workers}")
        return share
