"""Throws damaged messages at every port of a run, and looks whether its servers go on as if nothing had come.

python -m faults.port_fuzzer [--seconds 600] [--seed N] [--keep FOLDER]

Messages are honest ones with a few changes, or nonsense; all follow from the seed. After every round each
server must answer an honest call. An answer may be an error of ours; one that says "see the log" is a bug.
A failure prints the seed, the number of the message and the message itself, and leaves them in
`port_failure.json` of the folder; `--seed N --first M` goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
from faults.port_servers import TOKEN
from pyarrow import flight
from services import warm

from monolith.store.row_requests import RowCall, RowHeader, incarnation_bytes

ROUND = 100
"""Messages between two looks at the servers."""
GROWTH = 400 << 20
"""Bytes that the servers may grow by after the first rounds, whatever they are sent."""

MOST_FILES = 300

PLACE = {"position": {"kind": "list", "next": 0}, "skip": 0}
CHUNK = {"job": "JOB", "epoch": 0, "number": 0, "sequence": 0}
FOLLOWED = {"reader": "r", "model": "", "share": 0}
DELTAS = {"after": {"epoch": "e1", "sequence": 0}, "state": -1, "wait": 0.0}
SNAPSHOT = {"stream": "", "chunk": 0, "buckets": [1, 2]}
TICKETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("worker", CHUNK),
    ("deltas", {"ask": "deltas", "body": {**FOLLOWED, **DELTAS}}),
    ("deltas", {"ask": "snapshot", "body": {**FOLLOWED, **SNAPSHOT}}),
)
PUSH = {"sender": "s", "number": 1}
ROW_CALLS = (
    (RowHeader(RowCall.LOOKUP, store=0, batches=1, ids=2), 16),
    (RowHeader(RowCall.PUSH, store=0, batches=1, ids=1, floats=4, step=1, event_time=1, number=1), 8 + 16),
)
"""Headers, and the bytes of their arrays beside the sizes."""
SERVED_ROWS = (
    RowHeader(RowCall.LOOKUP, store=0, batches=1, ids=2, incarnation=incarnation_bytes("1")),
    16,
)

STATE = {"position": {"next": 1}, "examples": 1, "skipped": 0, "event_time": None}
PUSHES = {
    "sender": "s",
    "places": [{"incarnation": "r", "last": 3, "since": 1, "carried": [1], "marks": {"0": 0}}],
}
WRITE = {"run": "r", "cut": "c", "prefix": "PREFIX", "full": True}

CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "dispatcher": {
        "register": {"worker": "w:1"},
        "deregister": {"worker": "w:1"},
        "lease": {"worker": "w:1", "wait": 0.0},
        "renew": {"worker": "w:1", "leases": [1, 2]},
        "announce": {"lease": 1, "sequence": 0, "place": PLACE, "size": 5, "after": PLACE},
        "finish": {"lease": 999},
        "fail": {"lease": 999, "error": "E"},
        "chunk": CHUNK,
        "attach": {"trainer": "t", "job": None, "turn": 0},
        "turns": {"trainer": "t", "session": "SESSION", "turn": 0, "most": 2, "wait": 0.0},
        "acknowledge": {"trainer": "t", "turn": 0},
        "release": {"trainer": "t"},
        "status": {},
    },
    "worker": {"ping": {}},
    "parameters": {
        "hello": {"incarnation": None},
        "describe": {},
        "stats": {"store": 0},
        "evict": {"store": 0, "now": "TIMES"},
        "step": {},
        "set_step": {"step": 3},
        "meeting.begin": {"run": "r", "num_workers": 2},
        "meeting.open": {"run": "r", "start": {"step": 1, "positions": [PLACE]}},
        "meeting.join": {"worker": 1, "member": "m", "wait": 0.0},
        "meeting.news": {"run": "r", "worker": 1, "seen": -1, "wait": 0.0},
        "meeting.halt": {"run": "r"},
        "meeting.arrive": {"run": "r", "worker": 1, "halt": 1, "state": STATE},
        "meeting.gathered": {"run": "r", "wait": 0.0, "left": False},
        "meeting.release": {"run": "r"},
        "meeting.saved": {"run": "r", "halt": 1},
        "meeting.over": {"run": "r", "wait": 0.0},
        "meeting.leave": {"run": "r", "worker": 1, "state": STATE, "pushes": PUSHES},
        "meeting.stop": {"run": "r", "reason": "x"},
        "meeting.resume": {"run": "r", "member": "m"},
        "meeting.back": {
            "run": "r",
            "worker": 1,
            "member": "m",
            "step": 1,
            "left": None,
            "lost": {"i": 1},
        },
        "meeting.served": {
            "run": "r",
            "server": 1,
            "served": {
                "address": "h:1",
                "incarnation": "i",
                "halt": 0,
                "copied": {"s": {"highest": 3, "missing": [2]}},
            },
        },
        "meeting.lost": {"run": "r", "worker": 1, "incarnation": "i", "updates": 1},
        "meeting.updates": {"run": "r", "incarnation": "i", "wait": 0.0},
        "meeting.given_back": {"run": "r", "worker": 1, "number": 1, "state": STATE},
        "meeting.deal": {"run": "r", "halt": 1, "states": {"1": STATE}},
        "server.standing": {},
        "server.attend": {"run": "r", "wait": 0.0},
        "server.health": {"run": "r"},
        "server.assign": {"index": 0, "num_ps": 1},
        "server.reserve": {},
        "server.end": {"run": "r"},
        "standby.open": {"run": "r"},
        "standby.follow": {"run": "r", "index": 0, "num_ps": 1, "address": "DELTAS", "incarnation": ""},
        "standby.standing": {},
        "standby.take_over": {"run": "r", "lost": "i", "incarnation": "j"},
        "publish.obey": {"action": "hold", "reason": "x", "version": None, "by_guard": False},
        "publish.told": {"run": "r", "step": 1, "watermark": 0},
        "publish.flush": {"run": "r"},
        "tables.cut": {"run": "r", "cut": "c"},
        "tables.close": {"run": "r", "cut": "c", "saved": False},
        "job.start": {
            "work": "tables.write",
            "body": WRITE,
            "job": "b",
        },
        "job.wait": {"job": "b", "wait": 0.0},
    },
    "guarded": {"describe": {}, "hello": {}},
    "serving": {"hello": {"version": "1"}, "status": {}},
    "deltas": {"shares": {"reader": "r", "model": ""}, "leave": {"reader": "r", "stream": ""}},
}
RESTORE = {
    "run": "r",
    "chain": [["PREFIX", {"tables": {}, "pieces": 1}]],
    "optimizer_state": "keep",
    "strict": True,
}
EXCHANGES: dict[str, tuple[dict[str, Any], int]] = {
    "push_dense": ({"names": [], **PUSH}, 0),
    "pull_dense": ({}, 0),
    "dump_dense": ({}, 0),
    "load_dense": ({}, 64),
    "put_buffers": ({"worker": 1, "examples": 8}, 8),
    "get_buffers": ({"worker": None}, 0),
    "publish.weights": ({"run": "r", "weights": 4}, 64),
}
CONTROL = (
    "StopTraining",
    "ResumeTraining",
    "GetBlockStatus",
    "SaveCheckpoint",
    "GetTrainingStatus",
    "Publish",
    "Nothing",
)
NUMBERS = (0, 1, -1, 2, -3, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**70, 1e9, 1e308, 0.5)
ODD: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    False,
    "",
    "x",
    "é" * 9,
    "../../etc/passwd",
    "\ud800",
    [],
    {},
    [[]],
)


class FuzzError(Exception):
    """A server did what none may do."""


class Mutator:
    """Changes values a little, by a random generator of its own."""

    def __init__(self, random_: random.Random) -> None:
        self.random = random_

    def body(self, honest: dict[str, Any]) -> bytes:
        chance = self.random.random()
        if chance < 0.05:
            return self.noise(self.random.randrange(64))
        body = json.loads(json.dumps(honest))
        for _ in range(self.random.choice((0, 0, 0, 1, 1, 1, 2, 4))):
            body = self.changed(body)
        text = json.dumps(body).encode()
        if chance < 0.15:
            text = self.damaged(text)
        return text

    def header(self, honest: RowHeader) -> bytes:
        """Return the header of a message about rows, with changes in its numbers or its bytes."""
        pick = self.random
        for _ in range(pick.choice((0, 0, 1, 2))):
            name = pick.choice(("store", "batches", "ids", "floats", "flags", "event_time", "number"))
            honest = honest._replace(**{name: pick.choice((0, 1, 2, 3, 5, 8, 15, 100, (1 << 16) - 1))})
        packed = honest._replace(number=pick.randrange(100)).packed()
        return self.damaged(packed) if pick.random() < 0.3 else packed

    def changed(self, value: Any) -> Any:
        """Return plain values with one change."""
        pick = self.random
        if isinstance(value, dict) and value and pick.random() < 0.9:
            key = pick.choice(list(value))
            what = pick.random()
            if what < 0.1:
                return {name: one for name, one in value.items() if name != key}
            if what < 0.2:
                return {**value, pick.choice(("more", "", key * 2)): self.odd()}
            return {**value, key: self.changed(value[key])}
        if isinstance(value, list) and value and pick.random() < 0.7:
            at = pick.randrange(len(value))
            return [*value[:at], *([self.changed(value[at])] * pick.choice((0, 1, 3))), *value[at + 1 :]]
        if pick.random() < 0.5:  # of the same kind
            if isinstance(value, bool):
                return not value
            if isinstance(value, (int, float)):
                return pick.choice((0, 1, 2, 3, 5, 100))
            if isinstance(value, str):
                return pick.choice(("a", "b", "r", "c", "w:1", "t", value * 2))
        return self.odd()

    def odd(self) -> Any:
        if self.random.random() < 0.1:
            return "y" * self.random.choice((100, 2000, 100_000))
        if self.random.random() < 0.05:
            return float(self.random.choice(("nan", "inf", "-inf")))
        return self.random.choice(ODD)

    def noise(self, size: int) -> bytes:
        return self.random.randbytes(size)

    def damaged(self, data: bytes) -> bytes:
        """Return bytes with a few of them changed, cut or doubled."""
        if not data:
            return self.noise(4)
        held = bytearray(data)
        for _ in range(self.random.choice((1, 1, 3))):
            at = self.random.randrange(len(held)) if held else 0
            what = self.random.randrange(4)
            if what == 0 and held:
                held[at] = self.random.randrange(256)
            elif what == 1:
                del held[at : at + self.random.randrange(1, 16)]
            elif what == 2:
                held[at:at] = held[at : at + 16]
            else:
                held[at : at + 8] = self.random.choice(NUMBERS[:11]).to_bytes(16, "little", signed=True)[:8]
        return bytes(held)


class Servers:
    """The process that is fuzzed."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "servers.log"
        self.prefix = str(folder / "model" / "model.ckpt-1")
        tests = str(Path(__file__).parents[1])
        with self.log.open("w") as log:
            self.process = warm.Popen(
                ["-m", "faults.port_servers", str(folder)],
                stdin=warm.PIPE,
                stdout=warm.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise FuzzError(f"the servers did not start: {self.log.read_text()}")
        self.addresses: dict[str, str] = json.loads(line)

    def rss(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise FuzzError("the servers did not end when they were told to") from None
        finally:
            self.process.stdout.close()


class PortFuzzer:
    """Sends messages, each by a random generator of its own: number and seed say which."""

    def __init__(self, servers: Servers, seed: int) -> None:
        self._servers = servers
        self._seed = seed
        self._clients = {name: flight.FlightClient(f"grpc+tcp://{servers.addresses[name]}") for name in CALLS}
        self._control = grpc.insecure_channel(servers.addresses["control"])
        self._known = self._learn()
        self.sent: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        """Answers by their error; "answered" for none."""
        self.message: Any = None
        """What was sent last."""

    def _learn(self) -> dict[str, Any]:
        """Ask what an honest caller knows: placeholders in the bodies above -> what they stand for."""

        def ask(server: str, name: str, **body: Any) -> Any:
            action = flight.Action(name, json.dumps(body).encode())
            (result,) = self._clients[server].do_action(action, _soon())
            return json.loads(result.body.to_pybytes())["answer"]

        attached = ask("dispatcher", "attach", trainer="t", job=None, turn=0)
        (store, *_) = ask("parameters", "describe")["stores"]
        self._tables = len(store["tables"])
        known = {"JOB": attached["job"], "SESSION": attached["session"], "PREFIX": self._servers.prefix}
        known["DELTAS"] = self._servers.addresses["deltas"]
        return {**known, "TIMES": dict.fromkeys(store["tables"], 1)}

    def _honest(self, body: Any) -> Any:
        if isinstance(body, dict):
            return {key: self._honest(value) for key, value in body.items()}
        if isinstance(body, list):
            return [self._honest(value) for value in body]
        return self._known.get(body, body) if isinstance(body, str) else body

    def send(self, number: int) -> None:
        """Send one message.

        Raises:
            FuzzError: The answer is none that a caller may get.
        """
        mutate = Mutator(random.Random(f"{self._seed}/{number}"))
        ways: list[Callable[[Mutator], str]] = [
            *([self._call] * 6),
            *([self._exchange] * 3),
            self._ticket,
            self._stray,
            self._headers,
            self._command,
            self._http,
        ]
        kind = mutate.random.choice(ways)(mutate)
        self.sent[kind] += 1

    def check(self) -> None:
        """Make an honest call to every server."""
        if self._servers.process.poll() is not None:
            raise FuzzError(f"the servers ended with status {self._servers.process.returncode}")
        honest = {"dispatcher": "status", "worker": "ping", "parameters": "describe", "serving": "status"}
        bodies = {"deltas": ("shares", b'{"reader": "honest", "model": ""}')}
        for name, (call, body) in {**{one: (call, b"{}") for one, call in honest.items()}, **bodies}.items():
            (result,) = self._clients[name].do_action(flight.Action(call, body), _soon())
            if "answer" not in json.loads(result.body.to_pybytes()):
                raise FuzzError(f"{name} no longer answers {call}: {result.body.to_pybytes()!r:.300}")
        status = self._control.unary_unary("/Controller/GetTrainingStatus")
        if status(b"", timeout=30, metadata=[("authorization", f"Bearer {TOKEN}")]) != b"\x08\x07":
            raise FuzzError("the control server no longer knows its step")
        host, _, port = self._servers.addresses["metrics"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as line:
            line.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            if b"200" not in line.recv(64):
                raise FuzzError("metrics are no longer served")

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._control.close()

    # Each returns what it sent, in a word

    def _call(self, mutate: Mutator) -> str:
        server = mutate.random.choice(
            ("dispatcher", "parameters", "parameters", "worker", "serving", "deltas")
        )
        name, honest = mutate.random.choice(list(CALLS[server].items()))
        if name == "job.start" and mutate.random.random() < 0.5:
            honest = {"work": "tables.restore", "body": RESTORE, "job": mutate.random.choice("abcdef")}
        body = mutate.body(self._honest(honest))
        if mutate.random.random() < 0.02:
            name = mutate.random.choice(("", name * 2, "\0", "__class__"))
        self.message = (server, name, body)
        (result,) = self._clients[server].do_action(flight.Action(name, body), _soon())
        self._judge(json.loads(result.body.to_pybytes()))
        return server

    def _ticket(self, mutate: Mutator) -> str:
        server, honest = mutate.random.choice(TICKETS)
        body = mutate.body(self._honest(honest))
        self.message = (server, "fetch", body)
        reader = self._clients[server].do_get(flight.Ticket(body), _soon())
        said = (reader.schema.metadata or {}).get(b"monolith.answer")
        if said is not None:
            self._judge(json.loads(said))
        return server

    def _exchange(self, mutate: Mutator) -> str:
        server, tables = mutate.random.choice((("parameters", self._tables), ("serving", 2)))
        if mutate.random.random() < 0.6:
            honest, ids = SERVED_ROWS if server == "serving" else mutate.random.choice(ROW_CALLS)
            header, size = mutate.header(honest), 8 * tables + ids
        else:
            name, (body, size) = mutate.random.choice(list(EXCHANGES.items()))
            header = mutate.body({"name": name, "body": body})
        data = mutate.noise(size)
        if mutate.random.random() < 0.3:
            data = mutate.damaged(data)
        if mutate.random.random() < 0.3:  # sizes of the pieces that may fit
            data = (
                b"".join(mutate.random.choice((0, 1, 2)).to_bytes(8, "little") for _ in range(tables))
                + data[8 * tables :]
            )
        self.message = (server, header, data)
        schema = pa.schema([("bytes", pa.uint8())])
        descriptor = flight.FlightDescriptor.for_command(mutate.noise(3))
        writer, reader = self._clients[server].do_exchange(descriptor, _soon())
        try:
            writer.begin(schema)
            column = pa.array(memoryview(data), pa.uint8()) if data else pa.array([], pa.uint8())
            writer.write_with_metadata(pa.RecordBatch.from_arrays([column], schema=schema), header)
            said = reader.read_chunk().app_metadata.to_pybytes()
            self._judge(json.loads(said) if said.startswith(b"{") else {})
        finally:
            with suppress(pa.ArrowException):
                reader.cancel()
            with suppress(pa.ArrowException):
                writer.close()
        return "stream"

    def _stray(self, mutate: Mutator) -> str:
        """A stream of another shape, or a call that Flight has and we have not."""
        client = self._clients[mutate.random.choice(("dispatcher", "worker", "parameters", "serving"))]
        kind = mutate.random.choice((pa.string(), pa.list_(pa.uint8()), pa.null(), pa.float64()))
        self.message = ("any", "stray", str(kind))
        schema = pa.schema([("bytes", kind)] * mutate.random.randrange(3))
        with suppress(pa.ArrowException):
            ask = mutate.random.randrange(4)
            descriptor = flight.FlightDescriptor.for_command(mutate.noise(9))
            if ask == 0:
                list(client.list_flights(mutate.noise(5), _soon()))
            elif ask == 1:
                client.get_flight_info(descriptor, _soon())
            else:
                start = client.do_exchange if ask == 2 else lambda one, soon: client.do_put(one, schema, soon)
                writer, reader = start(descriptor, _soon())
                if ask == 2:
                    writer.begin(schema)
                empty = [pa.array([], field.type) for field in schema]
                writer.write_with_metadata(pa.RecordBatch.from_arrays(empty, schema=schema), mutate.noise(9))
                if ask == 2 and mutate.random.random() < 0.5:
                    reader.read_chunk()
                with suppress(pa.ArrowException):
                    writer.close()
        return "stray"

    def _headers(self, mutate: Mutator) -> str:
        token = mutate.random.choice(
            ("", "Bearer", f"Bearer {TOKEN[:-1]}", f"bearer {TOKEN}", "Bearer " + "x" * 9000)
        )
        pairs = [(b"authorization", token.encode())] * mutate.random.choice((0, 1, 2))
        self.message = ("guarded", pairs, b"")
        options = flight.FlightCallOptions(timeout=30, headers=pairs)
        try:
            list(self._clients["guarded"].do_action(flight.Action("describe", mutate.body({})), options))
        except flight.FlightUnauthenticatedError:
            return "guarded"
        except (pa.ArrowException, flight.FlightError):  # headers that are longer than gRPC reads
            return "guarded"
        raise FuzzError("a call without the token was answered")

    def _command(self, mutate: Mutator) -> str:
        name, body = mutate.random.choice(CONTROL), mutate.noise(mutate.random.choice((0, 0, 5, 100)))
        known = mutate.random.random() < 0.8
        self.message = ("control", name, body)
        token = [("authorization", f"Bearer {TOKEN}" if known else "Bearer x")]
        try:
            self._control.unary_unary(f"/Controller/{name}")(body, timeout=30, metadata=token)
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                raise FuzzError(f"the control server does not answer {name}: {code}") from error
            return "control"
        if not known:
            raise FuzzError("a command without the token was obeyed")
        return "control"

    def _http(self, mutate: Mutator) -> str:
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
        message = mutate.damaged(request) if mutate.random.random() < 0.7 else mutate.noise(200)
        self.message = ("metrics", "", message)
        host, _, port = self._servers.addresses["metrics"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as line, suppress(OSError):
            line.sendall(message)
            line.shutdown(socket.SHUT_WR)
            line.settimeout(5)
            line.recv(256)
        return "metrics"

    def _judge(self, answer: dict[str, Any]) -> None:
        self.outcomes[answer.get("error", "answered")] += 1
        if "error" not in answer:
            return
        if not answer["error"]:
            raise FuzzError(f"a handler failed: {answer['message']}")
        if "Traceback" in answer["message"] or '.py"' in answer["message"]:
            raise FuzzError(f"a caller was told too much: {answer['message']}")


def _soon() -> Any:
    return flight.FlightCallOptions(timeout=30)


def fuzz(
    seconds: float, seed: int, folder: Path, *, first: int = 0, say: Callable[[str], None] | None = None
) -> PortFuzzer:
    """Fuzz for so long; return what was sent, and what came of it.

    Raises:
        FuzzError: Says how to see it again.
    """
    servers = Servers(folder)
    fuzzer = PortFuzzer(servers, seed)
    number, begun, told, flat = first, time.monotonic(), 0.0, 0
    try:
        while (took := time.monotonic() - begun) < seconds:
            for _ in range(ROUND):
                number += 1
                fuzzer.send(number)
            fuzzer.check()
            rss, files = servers.rss(), servers.open_files()
            if files > MOST_FILES:
                raise FuzzError(f"the servers have {files} files open")
            if number - first <= 20 * ROUND:
                flat = max(flat, rss)
            elif rss > flat + GROWTH:
                raise FuzzError(f"the servers grew from {flat >> 20} to {rss >> 20} MiB")
            if say is not None and took - told >= 15:
                told = took
                say(f"{took:6.0f} s: {number - first} messages, {rss >> 20} MiB, {dict(fuzzer.sent)}")
        fuzzer.close()
        servers.close()
    except Exception as error:
        servers.process.kill()
        servers.process.wait()
        found = {"seed": seed, "number": number, "message": repr(fuzzer.message), "error": repr(error)}
        (folder / "port_failure.json").write_text(json.dumps(found, indent=2))
        log = servers.log.read_text()[-4000:]
        raise FuzzError(
            f"{error}\nmessage {number} of seed {seed}: {fuzzer.message!r:.2000}\n"
            f"see it again: python -m faults.port_fuzzer --seed {seed} --first {number - 1}\n{log}"
        ) from error
    return fuzzer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="monolith-fuzz-") as made:
        folder = Path(made) if given.keep is None else given.keep
        folder.mkdir(parents=True, exist_ok=True)
        _say(f"fuzzing ports for {given.seconds:g} s with seed {given.seed}")
        try:
            fuzzer = fuzz(given.seconds, given.seed, folder, first=given.first, say=_say)
        except FuzzError as failure:
            sys.exit(f"fuzz: {failure}")
        _say(f"{sum(fuzzer.sent.values())} messages: {dict(fuzzer.sent)}")
        _say(f"every server answers; what came of them: {dict(fuzzer.outcomes)}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
