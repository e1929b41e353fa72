"""Holders where every rank has a share of the rows: each publishes its own, and rank 0 orders them all."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from monolith.store import RankGroups
from monolith.sync.messages import LearnedUpTo, LogPosition
from monolith.train.publishing.bodies import PublishedShares, PublishOrder, ShareStanding, sound
from monolith.train.publishing.share import SharePublisher
from monolith.wire.messages import Json, read_message, write_message

_OBEY = "publish/obey"


class RowsOfRanks:
    """Holders of a run of ranks, as one of them sees them. Rank 0 leads, and has the weights of all."""

    def __init__(self, groups: RankGroups, share: SharePublisher) -> None:
        self._groups = groups
        self._share = share
        self._lock = threading.Lock()  # guards what follows
        self._standings: dict[int, ShareStanding] = {}
        groups.calls.offer({_OBEY: self._answer})

    @property
    def brings_weights(self) -> bool:
        return self._groups.rank == 0

    def start(self) -> None:
        self._share.start()

    def note(self, learned: LearnedUpTo) -> None:
        self._share.learning.note(learned)

    def bring(self, weights: Mapping[str, Tensor]) -> None:
        self._share.bring(weights)

    def obey(self, order: PublishOrder) -> Sequence[ShareStanding]:
        found = self._groups.calls.ask_all(_OBEY, write_message(order))
        shares = [one for answer in found for one in read_message(PublishedShares, answer).shares]
        with self._lock:
            self._standings |= {one.share: one for one in shares}
        return shares

    def places(self) -> Mapping[int, LogPosition]:
        with self._lock:
            found = dict(self._standings)
        if len(found) < self._groups.size:
            return {}  # part of the places would be read as if there were fewer shares
        return {share: LogPosition(one.epoch, one.sequence) for share, one in found.items()}

    def flush(self) -> None:
        self._share.flush()

    def close(self) -> None:
        self._share.close()

    def _answer(self, body: dict[str, Json]) -> dict[str, Json]:
        order = sound(read_message(PublishOrder, body))
        return write_message(PublishedShares(self._share.obey(order)))
