"""What a stranger, another user of the machine, can do to a run: nothing that matters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from data.service.loopback import until
from faults.port_fuzzer import Servers
from faults.port_servers import TOKEN
from faults.strangers import Stranger, is_root
from services import warm

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.data.files import FileSource
from monolith.data.formats import format_of
from monolith.errors import RequestError
from monolith.store.server import SERVICE
from monolith.train.hooks import ControlClient
from monolith.wire.flight import Caller

pytest.importorskip("pyarrow.flight")

LINES = """
from monolith.data import Records
from monolith.data.files import FileSource
from monolith.data.formats import format_of
from monolith.tensors import RaggedTensor

def table(path):
    return FileSource([path], format_of(path, "csv"), batch_size=1)

class Lines:
    def __init__(self, path):
        self._lines = [int(line) for line in open(path)]
        self._next = 0
    def __iter__(self):
        while self._next < len(self._lines):
            self._next += 1
            yield Records(1, {"id": RaggedTensor.from_list([[self._lines[self._next - 1]]])})
    def position(self):
        return {"next": self._next}
    def restore(self, position):
        self._next = position["next"]
    def close(self):
        pass
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    with closing(Stranger()) as stranger:
        yield stranger


def start(stack: ExitStack, folder: Path, *words: str) -> warm.Popen:
    """Start a command; it is gone when the test ends."""
    process = warm.Popen(
        ["-m", "monolith", *words],
        cwd=folder,
        stdout=warm.PIPE,
        env={**os.environ, "PYTHONPATH": str(folder), "XDG_STATE_HOME": str(folder / "state")},
    )

    def end() -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    stack.callback(end)
    return process


def address_of(process: warm.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip().partition(" ")[2]


class Service:
    """A data service of three records, as its commands start it on this machine."""

    def __init__(self, stack: ExitStack, folder: Path, *flags: str, source: str = "Lines") -> None:
        (folder / "lines_source.py").write_text(LINES)
        (folder / "a.txt").write_text("1\n2\n3\n")
        data = ("--splits", f"{folder}/a.txt", "--folder", str(folder / "job"), "--lease", "1", "--port", "0")
        self.dispatcher_process = start(stack, folder, "data", "dispatcher", *data, *flags)
        self.dispatcher = address_of(self.dispatcher_process)
        read = ("--source", f"lines_source:{source}", "--chunk-records", "1", *flags)
        self._start_worker = lambda: start(
            stack, folder, "data", "worker", "--dispatcher", self.dispatcher, *read
        )

    def add_worker(self) -> None:
        self.worker_process = self._start_worker()
        self.worker = address_of(self.worker_process)


@pytest.fixture
def service(stack: ExitStack, tmp_path: Path) -> Service:
    """A data service that admits everybody: what its calls themselves refuse."""
    service = Service(stack, tmp_path, "--insecure")
    service.add_worker()
    return service


@pytest.fixture
def secret(stranger: Stranger, tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text("name,password\nroot,42\n")
    path.chmod(0o600)
    if is_root():
        assert not stranger.may_read(path)
    return path


def test_a_data_service_that_was_told_nothing_of_security_demands_a_token(
    stack: ExitStack, stranger: Stranger, tmp_path: Path
) -> None:
    service = Service(stack, tmp_path)
    service.add_worker()
    for address, calls in {
        service.dispatcher: {"status": {}, "register": {"worker": "x"}, "lease": {"worker": "x", "wait": 0}},
        service.worker: {"ping": {}},
    }.items():
        for name, body in calls.items():
            assert stranger.call(address, name, **body)["refused"] == "FlightUnauthenticatedError", name
    ticket = {"job": "x", "epoch": 0, "number": 0, "sequence": 0}
    assert stranger.fetch(service.worker, **ticket)["refused"] == "FlightUnauthenticatedError"


@pytest.mark.parametrize("key", ["backlog", "file"])
def test_a_chunk_whose_position_names_a_file_outside_the_job_is_not_read(
    stack: ExitStack, stranger: Stranger, tmp_path: Path, secret: Path, key: str
) -> None:
    """A stranger leases a split, announces a chunk of another file and fetches it."""
    service = Service(stack, tmp_path, "--insecure", source="table")
    lease = stranger.call(service.dispatcher, "lease", worker="stranger", wait=0)["answer"]["lease"]
    position = position_of(str(tmp_path / "a.txt"))
    position |= {
        "backlog": {"backlog": [[0, str(secret), 0, 0, 0, 0]], "first_epoch": 1},
        "file": {"file": str(secret)},
    }[key]
    place = {"position": position, "skip": 0}
    said = stranger.call(
        service.dispatcher,
        "announce",
        lease=lease["lease"],
        sequence=lease["sequence"],
        place=place,
        size=1,
        after=place,
    )
    assert said["answer"] == {"held": True}
    service.add_worker()
    job = stranger.call(service.dispatcher, "status")["answer"]["job"]
    said = stranger.fetch(service.worker, job=job, epoch=0, number=0, sequence=lease["sequence"])
    assert "rows" not in said
    assert said["error"] == "RestoreError"
    assert "42" not in said["message"]


def position_of(path: str) -> dict[str, Any]:
    """Return the first position of a source of one file."""
    with closing(FileSource([path], format_of(path, "csv"), batch_size=1)) as source:
        return source.position()


def test_a_ticket_that_names_a_foreign_file_is_refused(
    service: Service, stranger: Stranger, secret: Path
) -> None:
    place = {"position": {"next": 0}, "skip": 0}
    ids = {"job": "x", "epoch": 0, "number": 0, "sequence": 0}
    said = stranger.fetch(service.worker, **ids, split=str(secret), place=place, size=1)
    assert said["error"] == "RequestError"
    assert "split: unknown key" in said["message"]
    for number in (0, 1, 9):
        said = stranger.fetch(service.worker, **{**ids, "number": number})
        assert said["error"] == "DataError", said
        assert "this job has no chunk" in said["message"]
    job = stranger.call(service.dispatcher, "status")["answer"]["job"]
    until(lambda: stranger.call(service.dispatcher, "status")["answer"]["records"] == 3)
    for _ in range(2):  # out of the buffer, and read again: what the job has, and nothing else
        assert stranger.fetch(service.worker, **{**ids, "job": job})["rows"] == [{"id": [1]}]


def test_a_ticket_with_a_size_is_refused_and_the_worker_ends_when_told(
    service: Service, stranger: Stranger
) -> None:
    place = {"position": {"next": 0}, "skip": 0}
    ids = {"job": "x", "epoch": 0, "number": 0, "sequence": 0}
    for size in (-3, 0, None):
        said = stranger.fetch(service.worker, **ids, split="a.txt", place=place, size=size)
        assert said["error"] == "RequestError"
    service.worker_process.terminate()
    assert service.worker_process.wait(30) == 0


def test_a_worker_with_a_number_for_a_name_does_not_end_the_dispatcher(
    service: Service, stranger: Stranger
) -> None:
    said = stranger.call(service.dispatcher, "register", worker=5)
    assert said == {
        "error": "RequestError",
        "message": "data service: register: worker: expected str, got 5",
    }
    for body in ({}, {"worker": None}, {"worker": ["x"]}, {"worker": "x", "more": 1}):
        assert stranger.call(service.dispatcher, "register", **body)["error"] == "RequestError"
    until(lambda: len(stranger.call(service.dispatcher, "status")["answer"]["workers"]) == 1)
    assert service.dispatcher_process.poll() is None


# A large message


def test_a_large_message_without_the_token_is_cut_off_before_it_is_in_memory(
    stack: ExitStack, stranger: Stranger, tmp_path: Path
) -> None:
    servers = Servers(tmp_path)
    stack.callback(servers.close)

    def peak() -> int:
        status = Path(f"/proc/{servers.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) << 10

    before = peak()
    said = stranger.send(servers.addresses["guarded"], 600 << 20)
    assert "refused" in said
    assert peak() - before < 200 << 20
    assert "limits.stranger_bytes" in servers.log.read_text()
    guard = Guard(token=Secret(TOKEN))  # whoever knows it may send much, on the same port
    with Caller(SERVICE, servers.addresses["guarded"], guard=guard) as caller:
        with pytest.raises(RequestError, match=r"and limits\.call_bytes allows"):
            caller.call("hello", incarnation="x" * (8 << 20))
        assert caller.call("step") == {"step": 0}


# A run


TESTS = Path(__file__).parents[1]
LISTENS = re.compile(r"parameter server 0 of 1 listens on (\S+)")


class Launched:
    """A run without end, as `monolith train --launch local` makes one."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.model_dir = folder / "m"
        self._log = folder / "err"
        words = (
            "train.tasks:Clicks",
            "--launch",
            "local",
            "--num-ps",
            "1",
            "--num-workers",
            "1",
            "--control",
        )
        with self._log.open("w") as log:
            self.process = warm.Popen(
                [
                    *("-m", "monolith", "train", *words),
                    *("--control", "--model-dir", str(self.model_dir), "--set", "batches=10000000"),
                ],
                stdout=warm.DEVNULL,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.server = ""
        until(self._is_ready, 120)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        found = LISTENS.search(self._log.read_text())
        self.server = found[1] if found else ""
        return bool(found) and (self.model_dir / "controller_server_addr.txt").exists()

    def members(self) -> list[int]:
        """Return the processes of the run."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if (
                    folder.name.isdecimal()
                    and str(self.model_dir).encode() in (folder / "cmdline").read_bytes()
                ):
                    found.append(int(folder.name))
        return found


def test_another_user_learns_nothing_of_a_launched_run_writes_nothing_and_does_not_end_it(
    stack: ExitStack, stranger: Stranger, tmp_path: Path
) -> None:
    run = Launched(stack, tmp_path)
    written = tmp_path / "written"
    for name, body in {
        "describe": {},
        "meeting.join": {"worker": 0},
        "meeting.begin": {"run": "x", "num_workers": 1},
        "server.begin": {"run": "x"},
        "server.end": {"run": "x"},
        "tables.cut": {"cut": "x"},
        "job.start": {"work": "tables.write", "body": {"cut": "x", "prefix": str(written), "full": True}},
        "set_step": {"step": 0},
    }.items():
        said = stranger.call(run.server, name, **body)
        assert said["refused"] == "FlightUnauthenticatedError", (name, said)
        assert str(tmp_path) not in said["message"]
        assert "Traceback" not in said["message"]
    assert stranger.stream(run.server)["refused"] == "FlightUnauthenticatedError"
    if is_root():
        assert not stranger.may_read(run.model_dir / "controller_server_token")
        assert len(run.members()) >= 3
        for member in run.members():
            assert not stranger.may_read(Path(f"/proc/{member}/environ"))
    with ControlClient(str(run.model_dir)) as job:  # its owner may
        before = job.global_step()
        until(lambda: job.global_step() > before)
    run.process.terminate()
    assert run.process.wait(120) == 143
    assert not written.exists()
    assert (run.model_dir / "checkpoint").exists()
