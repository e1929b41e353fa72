"""Control of a running job over gRPC."""

from __future__ import annotations

import json
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from data.service.loopback import until
from train.runs import FakeRun, train

from monolith.cluster.security import SecurityConfig
from monolith.config import Secret
from monolith.errors import (
    BarrierAlreadyPlacedError,
    ConfigError,
    ListenError,
    MissingExtraError,
    ProfilerBusyError,
    TrainingError,
)
from monolith.train.hooks import (
    BarrierHook,
    BlockStatus,
    ControlClient,
    ControlServerHook,
    LocalBarrier,
    SaveHook,
    control_server,
)
from monolith.train.hooks.control_server import ControlServer
from monolith.train.hooks.profiling import Tracer
from monolith.wire.ports import Limits

grpc = pytest.importorskip("grpc")
SECONDS = 60.0


class NoTrace:
    """Records nothing of torch."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text('{"traceEvents": []}')


def saved() -> Future[str | None]:
    future: Future[str | None] = Future()
    future.set_result("model.ckpt-7")
    return future


@pytest.fixture
def serve(tmp_path):
    hooks = []

    def start(capacity: int = 1, trigger_save=saved, **options) -> ControlServerHook:
        hook = ControlServerHook(LocalBarrier(capacity), trigger_save, grace=0.1, **options)
        hooks.append(hook)
        hook.after_create(FakeRun(tmp_path, step=7))
        return hook

    yield start
    for hook in hooks:
        hook.close()


def test_stop_resume_save_and_status(serve, tmp_path):
    serve()
    with ControlClient(str(tmp_path)) as job:
        job.stop_training()
        with pytest.raises(BarrierAlreadyPlacedError):
            job.stop_training()
        assert job.block_status() == BlockStatus(blocked=(0,), unblocked=())
        job.resume_training()
        assert job.block_status() == BlockStatus(blocked=(), unblocked=(0,))
        job.save_checkpoint()
        assert job.global_step() == 7


def test_the_address_is_in_a_file_for_as_long_as_it_serves(serve, tmp_path):
    path = tmp_path / "controller_server_addr.txt"
    hook = serve()
    assert path.read_text() == hook.address
    assert hook.address.startswith("127.0.0.1:")
    hook.close()
    assert not path.exists()
    assert hook.address is None


def test_a_server_that_never_started_can_be_closed(tmp_path):
    hook = ControlServerHook(LocalBarrier(1), saved)
    hook.end(FakeRun(tmp_path))
    hook.close()
    assert list(tmp_path.iterdir()) == []


def test_without_certificates_or_a_token_it_listens_on_this_machine_only(serve):
    with pytest.raises(ConfigError, match=r"cannot listen on 0\.0\.0\.0"):
        serve(address="0.0.0.0:0")


def test_a_caller_that_does_not_know_the_token_is_refused(serve, tmp_path):
    hook = serve(security=SecurityConfig(token=Secret("secret")))
    for security in (None, SecurityConfig(token=Secret("wrong"))):
        with (
            ControlClient(str(tmp_path), security=security) as job,
            pytest.raises(ConfigError, match="token"),
        ):
            job.stop_training()
    assert hook._barrier.placement() is None
    with ControlClient(str(tmp_path), security=SecurityConfig(token=Secret("secret"))) as job:
        assert job.global_step() == 7


def test_a_job_without_a_token_makes_one_that_only_its_user_can_read(serve, tmp_path):
    hook = serve()
    token = tmp_path / "controller_server_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    with ControlClient(str(tmp_path)) as job:
        assert job.global_step() == 7
    made = token.read_text()
    token.unlink()
    with ControlClient(str(tmp_path)) as job:  # as somebody who may not read it
        for call in (job.stop_training, job.resume_training, job.save_checkpoint, job.global_step):
            with pytest.raises(ConfigError, match="token"):
                call()
    token.write_text(made)
    token.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0600"):
        ControlClient(str(tmp_path))
    hook.close()
    assert list(tmp_path.iterdir()) == [token]  # that of the other processes of the run, too


def test_processes_of_a_run_share_the_token_that_one_of_them_has_made(serve, tmp_path):
    serve()
    other = ControlServer({}, tracer=Tracer(str(tmp_path / "profile"), "ps_0", make=NoTrace), grace=0.1)
    other.start(str(tmp_path))
    try:
        with ControlClient(str(tmp_path), address=other.address) as job:
            trace = job.profile(seconds=0.05)
            with pytest.raises(TrainingError, match="UNIMPLEMENTED"):
                job.stop_training()
    finally:
        other.close()
    assert Path(trace.path).name.startswith("ps_0_")
    assert json.loads(Path(trace.path).read_text())["traceEvents"]


def test_a_profile_is_refused_while_another_one_is_recorded_and_ends_with_the_run(serve, tmp_path):
    begun = threading.Event()

    def recorder() -> NoTrace:
        begun.set()
        return NoTrace()

    hook = serve(tracer=Tracer(str(tmp_path / "profile"), "worker_0", make=recorder))
    with ControlClient(str(tmp_path)) as job, ThreadPoolExecutor(1) as pool:
        first = pool.submit(job.profile, seconds=100.0)
        assert begun.wait(SECONDS)
        with pytest.raises(ProfilerBusyError, match="worker_0 is being profiled already"):
            job.profile(seconds=0.01)
        hook.close()
        with pytest.raises(TrainingError, match="given up"):
            first.result(SECONDS)


def test_what_a_profile_cannot_have_is_refused_with_the_reason(serve, tmp_path):
    serve(tracer=Tracer(str(tmp_path), "worker_0", make=NoTrace))
    with ControlClient(str(tmp_path)) as job:
        with pytest.raises(ConfigError, match="takes no steps"):
            job.profile(steps=3)
        with pytest.raises(ConfigError, match="at most 120"):
            job.profile(seconds=1000.0)


def test_unfinished_saves_leave_room_for_others(serve, tmp_path):
    saves: list[Future[str | None]] = []

    def trigger() -> Future[str | None]:
        saves.append(Future())
        return saves[-1]

    serve(trigger_save=trigger, limits=Limits(saves=4))

    def save() -> None:
        with ControlClient(str(tmp_path)) as job:
            job.save_checkpoint()

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(save) for _ in range(4)]
        until(lambda: len(saves) == 4)
        with ControlClient(str(tmp_path), timeout=SECONDS) as job:
            assert job.global_step() == 7
            job.stop_training()
            job.resume_training()
            with pytest.raises(TrainingError, match=r"RESOURCE_EXHAUSTED: 4 callers wait .* limits\.saves"):
                job.save_checkpoint()
            for future in saves:
                future.set_result(None)
            for one in waiting:
                one.result(SECONDS)
            again = pool.submit(save)
            until(lambda: len(saves) == 5)
            saves[-1].set_result(None)
            again.result(SECONDS)


def test_the_answer_to_a_failed_call_has_no_path_and_no_traceback(serve, tmp_path):
    errors = iter([OSError(28, "No space left on device", "/home/me/x"), KeyError("/home/me/x")])

    def trigger() -> Future[str | None]:
        raise next(errors)

    serve(trigger_save=trigger)
    with ControlClient(str(tmp_path)) as job:
        with pytest.raises(TrainingError, match=r"cannot save: OSError: No space left on device$"):
            job.save_checkpoint()
        with pytest.raises(TrainingError, match=r"cannot save: KeyError: see the log of the run$"):
            job.save_checkpoint()


def test_a_save_is_answered_when_it_is_on_disk(serve, tmp_path):
    future: Future[str | None] = Future()
    asked = threading.Event()

    def trigger() -> Future[str | None]:
        asked.set()
        return future

    serve(trigger_save=trigger)
    answered = threading.Event()

    def call() -> None:
        with ControlClient(str(tmp_path)) as job:
            job.save_checkpoint()
            answered.set()

    thread = threading.Thread(target=call)
    thread.start()
    assert asked.wait(SECONDS)
    assert not answered.is_set()
    future.set_result("model.ckpt-7")
    assert answered.wait(SECONDS)
    thread.join(SECONDS)


def test_a_save_that_is_done_as_its_wait_ends_has_not_failed(serve, tmp_path):
    class JustInTime(Future[str | None]):
        """Is done in the very moment in which whoever waits for its result gives up."""

        def result(self, timeout=None):
            try:
                return super().result(timeout)
            except TimeoutError:
                self.set_result("model.ckpt-7")
                raise

    future = JustInTime()
    later = threading.Timer(1.0, lambda: future.done() or future.set_result("model.ckpt-7"))
    later.start()
    serve(trigger_save=lambda: future)
    with ControlClient(str(tmp_path)) as job:
        job.save_checkpoint(timeout=SECONDS)
    later.join(SECONDS)


@pytest.mark.parametrize("error", [OSError("disk full"), TimeoutError("disk full")])
def test_a_save_that_fails_is_an_error_of_the_call(serve, tmp_path, error):
    def trigger() -> Future[str | None]:
        future: Future[str | None] = Future()
        future.set_exception(error)
        return future

    serve(trigger_save=trigger)
    with ControlClient(str(tmp_path)) as job, pytest.raises(TrainingError, match="disk full"):
        job.save_checkpoint()


def test_the_end_of_the_run_ends_a_call_that_waits(serve, tmp_path):
    asked = threading.Event()

    def trigger() -> Future[str | None]:
        asked.set()
        return Future()

    hook = serve(trigger_save=trigger)
    errors = []

    def call() -> None:
        with ControlClient(str(tmp_path)) as job:
            try:
                job.save_checkpoint()
            except TrainingError as error:
                errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert asked.wait(SECONDS)
    hook._grace = SECONDS
    begin = time.monotonic()
    hook.close()
    thread.join(SECONDS)
    assert len(errors) == 1
    assert time.monotonic() - begin < SECONDS / 2


def test_a_job_that_does_not_run_cannot_be_called(tmp_path):
    with pytest.raises(TrainingError, match=r"controller_server_addr\.txt"):
        ControlClient(str(tmp_path))


def test_a_job_that_is_gone_gives_no_answer(serve, tmp_path):
    hook = serve()
    with ControlClient(str(tmp_path), timeout=SECONDS) as job:
        hook.close()
        with pytest.raises(TrainingError, match="UNAVAILABLE"):
            job.global_step()


def test_an_address_without_a_server_is_that_of_a_job_that_has_ended():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    with (
        ControlClient("", address=address, timeout=SECONDS) as job,
        pytest.raises(TrainingError, match="No process listens there: the job has ended, was killed"),
    ):
        job.global_step()


def test_a_port_that_is_taken_is_an_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hook = ControlServerHook(LocalBarrier(1), saved, address=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ListenError, match="cannot serve the controller"):
            hook.after_create(FakeRun(tmp_path))
    assert not (tmp_path / "controller_server_addr.txt").exists()


def test_without_grpc_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[grpc\]"):
        ControlServerHook(LocalBarrier(1), saved).after_create(FakeRun(tmp_path))


class Files:
    """A checkpointer of empty files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def snapshot(self, step: int) -> OneFile:
        return OneFile(self.folder / f"model.ckpt-{step}")


class OneFile:
    kind = "full"

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self) -> str:
        self.path.touch()
        return str(self.path)

    def close(self, *, saved: bool) -> None: ...


def test_a_job_is_halted_saved_and_resumed(tmp_path):
    run = FakeRun(tmp_path)
    barrier = LocalBarrier(1)
    save = SaveHook(Files(tmp_path))
    server = ControlServerHook(barrier, save.trigger_save)
    halt = BarrierHook(barrier, idle=[save.before_step], poll=0.001)
    started = threading.Event()
    finish = threading.Event()

    def step(run: FakeRun) -> None:
        started.set()
        if finish.is_set():
            run.request_stop("enough")

    thread = threading.Thread(
        target=train, args=([save, server, halt], 10**9), kwargs={"run": run, "on_step": step}
    )
    thread.start()
    assert started.wait(SECONDS)
    with ControlClient(str(tmp_path)) as job:
        job.stop_training()
        job.save_checkpoint()
        first = job.global_step()
        job.save_checkpoint()
        assert job.global_step() - first <= 1  # at most the step that was under way
        assert (tmp_path / f"model.ckpt-{job.global_step()}").exists()
        job.resume_training()
    finish.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert (tmp_path / f"model.ckpt-{run.step}").exists()
    assert not (tmp_path / "controller_server_addr.txt").exists()


def half_open(address: str, stack: ExitStack, count: int, **headers: str) -> list[Any]:
    """Begin calls whose message never comes."""
    stop = threading.Event()
    stack.callback(stop.set)

    def silence() -> Iterator[bytes]:
        stop.wait()
        return
        yield

    channel = stack.enter_context(grpc.insecure_channel(address))
    method = channel.stream_unary("/Controller/GetTrainingStatus")
    return [method.future(silence(), metadata=tuple(headers.items())) for _ in range(count)]


def test_calls_without_the_token_are_refused_before_their_message_comes(serve, tmp_path):
    hook = serve()
    with ExitStack() as stack:
        for call in half_open(hook.address, stack, 30):  # it has 9 threads
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        with ControlClient(str(tmp_path)) as job:
            assert job.global_step() == 7


def test_calls_whose_message_does_not_come_are_cancelled(tmp_path):
    token = Secret("only-for-tests")
    calls = {"GetTrainingStatus": lambda *_: None}
    server = ControlServer(calls, security=SecurityConfig(token=token), grace=0.1, message_within=0.2)
    server.start(str(tmp_path))
    try:
        with ExitStack() as stack:
            for call in half_open(server.address, stack, 30, authorization=f"Bearer {token.reveal()}"):
                assert call.code() is grpc.StatusCode.CANCELLED
    finally:
        server.close()


def test_silent_connections_are_closed_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "_LOOK_EVERY", 0.02)
    monkeypatch.setattr(
        control_server, "Limits", lambda: Limits(peer_connections=5, admit_within=timedelta(seconds=0.5))
    )
    server = ControlServer({}, security=SecurityConfig(token=Secret("secret")), grace=0.1)
    server.start()
    assert server.address is not None
    host, _, port = server.address.rpartition(":")
    with ExitStack() as held:
        held.callback(server.close)
        silent = [held.enter_context(socket.create_connection((host, int(port)))) for _ in range(20)]
        for one in silent:
            one.settimeout(30)
            while one.recv(4096):  # gRPC greets first; the end is that the server hung up
                pass
