"""Positions in topics: the offset of the first message not yielded yet, by topic and partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from monolith.data.source import Position
from monolith.errors import RestoreError

if TYPE_CHECKING:
    pass

KIND = "kafka"

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
