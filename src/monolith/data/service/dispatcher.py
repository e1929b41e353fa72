"""The dispatcher: the one process that knows the job, and assigns splits and chunks.

It moves no records. Its calls are those of `Job`, as JSON; a call that waits for an event is answered when
the event happens, or after a moment with nothing. Other processes find it by an address, by a function that
returns one (`monolith.cluster.locator` makes one of a discovery), or by the variables of their scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, TypeVar

from monolith import concurrency
from monolith.data.service.job import DataJobConfig, Job
from monolith.data.service.messages import (
    AcknowledgeBody,
    AnnounceBody,
    AttachBody,
    Call,
    ChunkBody,
    Clock,
    DataServer,
    FailBody,
    FinishBody,
    LeaseBody,
    OfWorker,
    PortGuard,
    ReleaseBody,
    RenewBody,
    TurnsBody,
)
from monolith.errors import ConfigError, OutOfMemoryError
from monolith.wire.messages import Nothing, typed
from monolith.wire.ports import Limits

B = TypeVar("B")

_LOOK_AGAIN = 0.25
"""Seconds after which a waiting call looks for expired leases, which no call announces."""


class Dispatcher:
    """Runs a job until it is closed. Thread-safe.

    Args:
        folder: Of the job's state, on a local disk. A dispatcher that is started again with the same
            folder and config resumes the job, at the same port or another.
        host: Where to listen; only this machine by default.
        port: 0 lets the system choose.
        guard: What data workers and trainers must present.
        limits: What one of them may ask for.

    Raises:
        ListenError: The port is taken.
        RestoreError: The folder is of a job with other splits.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        config: DataJobConfig,
        *,
        folder: str,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        limits: Limits | None = None,
        clock: Clock = concurrency.monotonic,
    ) -> None:
        # Guards _job, which is not thread-safe, and _closing. Notified after every call that changes the job,
        # so that workers without a split and trainers without a chunk look again.
        self._changed = concurrency.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        """Why this process is to end: there was no memory for a call."""
        self._job = Job(config, folder, clock=clock)
        self._longest = (limits or Limits()).wait.total_seconds()
        calls: dict[str, Call] = {
            "register": self._locked(OfWorker, lambda body: self._job.register(body.worker)),
            "deregister": self._locked(OfWorker, lambda body: self._job.deregister(body.worker)),
            "lease": typed(LeaseBody, self._lease),
            "renew": self._locked(RenewBody, self._renewed),
            "announce": self._locked(AnnounceBody, self._announced),
            "finish": self._locked(
                FinishBody, lambda body: {"held": self._job.finish(body.lease, body.chunks)}
            ),
            "fail": self._locked(FailBody, lambda body: self._job.fail(body.lease, body.error)),
            "chunk": self._locked(ChunkBody, lambda body: asdict(self._job.chunk(*body.id))),
            "attach": self._locked(AttachBody, self._attached),
            "turns": typed(TurnsBody, self._turns),
            "acknowledge": self._locked(
                AcknowledgeBody, lambda body: self._job.acknowledge(body.trainer, body.turn)
            ),
            "release": self._locked(
                ReleaseBody,
                lambda body: {"chunks": self._job.release(body.trainer, body.job, body.turn)},
            ),
            "status": self._locked(Nothing, lambda _: self._job.status()),
        }
        try:
            self._server = DataServer(
                calls, host=host, port=port, guard=guard, limits=limits, out_of_memory=self._fail
            )
        except BaseException:
            self._job.close()
            raise

    @property
    def address(self) -> str:
        """host:port, for data workers and trainers."""
        return self._server.address

    @property
    def port(self) -> int:
        return self._server.port

    def status(self) -> dict[str, Any]:
        """Return the progress of the job, its workers and its trainers: plain values that survive JSON.

        Raises:
            OutOfMemoryError: There was no memory for a call: the process is to end; its successor resumes.
        """
        if self._failure is not None:
            raise OutOfMemoryError(
                f"the dispatcher of the data service has no memory left: {self._failure}"
            ) from self._failure
        with self._changed:
            return self._job.status()

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def release(self, trainer: str) -> int:
        """Free the unacknowledged chunks of a trainer that will not return; return how many."""
        with self._changed:
            self._changed.notify_all()
            return self._job.release(trainer)

    def close(self) -> None:
        """Answer waiting calls, stop listening and release the folder. Closing again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._server.close()  # waits for calls in progress, so that the job is not closed under one
        self._job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _locked(self, kind: type[B], do: Callable[[B], dict[str, Any] | None]) -> Call:
        def answer(body: B) -> dict[str, Any] | None:
            with self._changed:
                answer = do(body)
                self._changed.notify_all()
                return answer

        return typed(kind, answer)

    def _lease(self, body: LeaseBody) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            lease = self._job.lease(body.worker)
            return None if lease is None else asdict(lease)

        with self._changed:
            every = self._job.config.lease.total_seconds() / 3
            return {"job": self._job.id, "renew_every": every, "lease": self._wait(look, body.wait)}

    def _turns(self, body: TurnsBody) -> dict[str, Any]:
        def look() -> list[dict[str, Any]] | None:
            chunks = self._job.turns(body.trainer, body.session, body.turn, body.most)
            return [asdict(chunk) for chunk in chunks] if chunks or self._job.is_over() else None

        with self._changed:
            chunks = self._wait(look, body.wait)
            over = chunks is not None and not chunks and body.most > 0
            return {"chunks": chunks or [], "over": over, "workers": self._job.workers()}

    def _wait(self, look: Callable[[], Any], seconds: float) -> Any:
        """Return the result of `look` as soon as it is not None; None after so many seconds."""
        until = concurrency.monotonic() + min(seconds, self._longest)
        while True:
            found = look()
            left = until - concurrency.monotonic()
            if found is not None or left <= 0 or self._closing:
                return found
            self._changed.wait(min(left, _LOOK_AGAIN))

    def _renewed(self, body: RenewBody) -> dict[str, Any]:
        lost, waiting = self._job.renew(body.worker, body.leases)
        return {"lost": lost, "waiting": waiting}

    def _announced(self, body: AnnounceBody) -> dict[str, Any]:
        place, after = body.place.read(), body.after.read()
        return {"held": self._job.announce(body.lease, body.sequence, place, body.size, after)}

    def _attached(self, body: AttachBody) -> dict[str, Any]:
        session = self._job.attach(body.trainer, body.job, body.turn, body.session)
        return {"job": self._job.id, "session": session}


DEFAULT_PORT = 2222
"""What MLP means where it names none."""


def dispatcher_from_environment(environment: Mapping[str, str], role: str = "dispatcher") -> str:
    """Return "host:port" of the dispatcher that MLP's variables name.

    Raises:
        ConfigError: They name none, or a port that is no number.
    """
    prefix = f"MLP_{role.upper()}_0"
    names = (f"{prefix}_PRIMARY_HOST", f"{prefix}_HOST")
    host = next((text for name in names if (text := _unquoted(environment.get(name, "")))), None)
    if host is None:
        raise ConfigError(
            f"data service: the environment has neither {names[0]} nor {names[1]}; name the dispatcher"
        )
    port = _unquoted(environment.get(f"{prefix}_PORT", "")) or str(DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"data service: {prefix}_PORT must be a port, got {port!r}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")
