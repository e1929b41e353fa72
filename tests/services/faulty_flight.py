"""A proxy for delta channels over Flight that loses, repeats, reorders and delays messages."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from typing import Any

from monolith.sync.flight_channel import SERVICE, pack_answer, unpack_answer
from monolith.sync.wire_format import LEAD_BYTES, frame_bytes
from monolith.wire.bulk import BulkMessages
from monolith.wire.endpoint import Handlers
from monolith.wire.flight import Caller
from monolith.wire.flight_server import Server
from monolith.wire.flight_transport import import_arrow


class FaultyProxy:
    """Stands between readers and one publisher. What happens to a message is drawn from a seed.

    Args:
        behind: host:port of the publisher; it may be away at times.
        chance: Of a message to be lost, of one to be repeated, of one to change places with the next, and of
            one to come with a later answer: each.
    """

    def __init__(self, behind: str, *, chance: float = 0.05, seed: int = 0, port: int = 0) -> None:
        self._behind = behind
        self.chance = chance
        self.faults = 0
        self._random = random.Random(seed)
        self._wire = BulkMessages(import_arrow("the proxy"))
        self._lock = threading.Lock()  # guards what is drawn and what is late
        self._late: defaultdict[tuple[Any, ...], list[bytes]] = defaultdict(list)
        calls = {name: self._forward(name) for name in ("shares", "leave")}
        self._server = Server(SERVICE, Handlers(calls=calls, fetch=self._fetch), port=port)
        self.address = self._server.address

    def close(self) -> None:
        self._server.close()

    def _forward(self, name: str) -> Any:
        def call(body: dict[str, Any]) -> dict[str, Any]:
            with Caller(SERVICE, self._behind) as caller:
                return caller.call(name, **body)

        return call

    def _fetch(self, ticket: dict[str, Any]) -> Any:
        with Caller(SERVICE, self._behind) as caller:
            about, data = unpack_answer(caller.fetch(ticket))
        frames = []
        while len(data):
            size = frame_bytes(data[:LEAD_BYTES])
            frames.append(bytes(data[:size]))
            data = data[size:]
        body = ticket["body"]
        with self._lock:
            return pack_answer(self._wire, about, self._arriving((body["reader"], ticket["ask"]), frames))

    def _arriving(self, whose: tuple[Any, ...], frames: list[bytes]) -> list[bytes]:
        found = self._late.pop(whose, [])
        for frame in frames:
            if self._happens():
                continue
            if self._happens():
                self._late[whose].append(frame)
                continue
            found.append(frame)
            if self._happens():
                found.append(frame)
            if len(found) > 1 and self._happens():
                found[-1], found[-2] = found[-2], found[-1]
        return found

    def _happens(self) -> bool:
        fault = self._random.random() < self.chance
        self.faults += fault
        return fault
