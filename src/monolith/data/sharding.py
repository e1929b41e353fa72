"""Sharding: which part of the data a worker reads.

Workers that train together must not read the same records. A task does not know about that: it makes its
stream as if it were the only worker, and the run assigns each worker a shard before the first read. Stages
and joins forward the shard to their sources.

    stream = task.dataset(Mode.TRAIN)
    stream.read_shard(Shard(1, 4))      # its FileSource reads every fourth file
"""

from __future__ import annotations

from typing import NamedTuple

from monolith.errors import ConfigError


class Shard(NamedTuple):
    """One of several equal parts of the data."""

    worker: int = 0
    workers: int = 1


class ShardChoice:
    """The shard that one source reads: as its arguments say, otherwise as the run says, otherwise everything.

        open ──choose──► open ──settle, by the first read, position or restore──► settled for good

    Args:
        source: The name of the source in messages.
        worker: The `worker` argument of the source. Without `num_workers`, the run says how many there are.
        num_workers: The `num_workers` argument of the source.

    Raises:
        ConfigError: There is no such worker.
    """

    def __init__(self, source: str, worker: int | None = None, num_workers: int | None = None) -> None:
        self._source = source
        self._worker = worker
        self._chosen = Shard()
        self._settled: Shard | None = None
        self._fixed: Shard | None = None
        if num_workers is not None:
            self._fixed = self._checked(Shard(worker or 0, num_workers))
        elif worker is not None and worker < 0:
            raise ConfigError(f"{source}: there is no worker {worker}; the first is 0")

    @property
    def is_fixed(self) -> bool:
        """Whether the arguments of the source name the shard, so that the run has no choice."""
        return self._fixed is not None

    def choose(self, shard: Shard) -> None:
        """Choose the shard, on behalf of the run.

        Raises:
            ConfigError: There is no such shard, or the choice is settled.
        """
        if self._settled is not None:
            raise ConfigError(
                f"{self._source}: cannot read shard {shard.worker} of {shard.workers} now, it was read or "
                "asked for its position before; call read_shard() first"
            )
        self._chosen = self._checked(shard)

    def settle(self) -> Shard:
        """Return the shard, which stays the same from now on.

        Raises:
            ConfigError: The `worker` of the source is not one of the workers of the run.
        """
        if self._settled is None:
            self._settled = self._choice()
        return self._settled

    def _choice(self) -> Shard:
        if self._fixed is not None:
            return self._fixed
        if self._worker is None:
            return self._chosen
        if self._worker >= self._chosen.workers:
            raise ConfigError(
                f"{self._source}: there is no worker {self._worker} of {self._chosen.workers}; give "
                "num_workers with it"
            )
        return Shard(self._worker, self._chosen.workers)

    def _checked(self, shard: Shard) -> Shard:
        if shard.workers < 1 or not 0 <= shard.worker < shard.workers:
            raise ConfigError(f"{self._source}: there is no worker {shard.worker} of {shard.workers}")
        return shard
