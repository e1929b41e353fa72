"""Positions in topics: the offset of the first message not yielded yet, by topic and partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from monolith.data.source import Position
from monolith.errors import RestoreError

KIND = "kafka"
_WAITS = "waits"
"""Marks the position of a worker to which the chief has assigned no partitions yet."""

Partition = tuple[str, int]
Offsets = dict[Partition, int]


def merge_positions(positions: Iterable[Position]) -> Position:
    """Return the position of several workers together, which any number of workers can be restored from.

    Of two that know a partition the later offset counts: the other one gave the partition away.

    Raises:
        RestoreError: One of them is not a position of Kafka.
    """
    offsets: Offsets = {}
    partitions: dict[str, int] = {}
    for position in positions:
        known, found = read_position(position)
        for topic, count in known.items():
            partitions[topic] = max(count, partitions.get(topic, 0))
        for partition, offset in found.items():
            offsets[partition] = max(offset, offsets.get(partition, 0))
    return make_position(partitions, offsets)


def split_position(position: Position, reads: Sequence[Callable[[Partition], bool]]) -> list[Position]:
    """Return the part of a position that each of several workers reads, by fixed assignment.

    Args:
        reads: Of each worker: whether a partition is its own.
    """
    partitions, offsets = read_position(position)
    return [
        make_position(partitions, {one: offset for one, offset in offsets.items() if mine(one)})
        for mine in reads
    ]


def divide_position(position: Position, workers: int) -> list[Position]:
    """Return the partitions of a position divided among so many workers, in turn."""
    partitions, offsets = read_position(position)
    divided: list[Offsets] = [{} for _ in range(workers)]
    for number, one in enumerate(sorted(offsets)):
        divided[number % workers][one] = offsets[one]
    return [make_position(partitions, mine) for mine in divided]


def empty_position(position: Position) -> Position:
    """Return the position of a worker that has no partition, and waits for some."""
    return {**make_position(read_position(position)[0], {}), _WAITS: True}


def waits_for_partitions(position: Position) -> bool:
    return bool(position.get(_WAITS, False))


def adopt_position(position: Position, end: Position | None) -> Position:
    """Return a position whose partitions are read by any worker, up to the offsets of a later one."""
    read_position(position)
    until = {} if end is None else end.get("offsets", {})
    return {**position, "adopted": until}


def read_adopted(position: Position) -> Offsets | None:
    """Return where the partitions of an adopted position end, if they do; None if it is not adopted."""
    if "adopted" not in position:
        return None
    return read_position({**position, "offsets": position["adopted"]})[1]


def make_position(partitions: Mapping[str, int], offsets: Mapping[Partition, int]) -> Position:
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return {"source": KIND, "partitions": dict(partitions), "offsets": by_topic}


def read_position(position: Position) -> tuple[dict[str, int], Offsets]:
    """Return how many partitions each topic had, and the offsets."""
    if not isinstance(position, Mapping) or position.get("source") != KIND:
        raise RestoreError(f"cannot restore a Kafka source from {position!r:.200}: of another kind")
    try:
        partitions = {topic: _whole(count) for topic, count in position["partitions"].items()}
        offsets = {
            (topic, int(partition)): _whole(offset)
            for topic, found in position["offsets"].items()
            for partition, offset in found.items()
        }
    except (KeyError, AttributeError, TypeError, ValueError) as cause:
        raise RestoreError(f"cannot restore a Kafka source from {position!r:.200}: {cause!r}") from cause
    return partitions, offsets


def _whole(number: object) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is not a whole number")
    return number
