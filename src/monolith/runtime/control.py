"""What lets an operator reach a process of a run: halt, resume and save at the chief, profile everywhere.

On its own machine its user can profile every process, see `monolith.cli.profile`. From other machines a
process is reached by its control server, and found by its file in status/ of the model_dir. It has one if
--control asks for it, and if MLP started the process: a worker then has it at its MLP_PORT, so that processes
that help the run see whether the chief lives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from monolith import filesystem
from monolith.cluster import concat_ip_and_port
from monolith.cluster.run_token import is_guarded
from monolith.cluster.security import SecurityConfig
from monolith.runtime import LocalRun
from monolith.runtime.config import RunConfig
from monolith.runtime.discovery import listen_address
from monolith.runtime.status import OwnStatus
from monolith.train import Hook, TrainingRun
from monolith.train.hooks import ActionFileHook, BarrierHook, ControllerHook, ControlServerHook
from monolith.train.hooks.control_server import ControlServer, control_token
from monolith.train.hooks.controller import ACTION_FILE
from monolith.train.hooks.profiling import FOLDER, Tracer

_log = logging.getLogger(__name__)

ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class ControlPlace:
    """Where a process serves its control, what it asks of callers, and what records its traces."""

    address: str
    security: SecurityConfig | None
    tracer: Tracer


def tracer_of(run: RunConfig, status: OwnStatus) -> Tracer:
    """Return what records the traces of this process, for all callers: torch records one at a time."""
    cluster, model_dir = run.cluster, run.train.model_dir
    steps = (lambda: status.status().step or 0) if cluster.role == "worker" else None
    folder = filesystem.join(model_dir, FOLDER) if model_dir else ""
    return Tracer(folder, f"{cluster.role}_{cluster.index}", steps=steps)


def control_place(
    run: RunConfig, environ: Mapping[str, str], tracer: Tracer, *, asked: bool
) -> ControlPlace | None:
    """Return the place at which this process is controlled; None if it has no control server.

    Args:
        run: The run as the operator gave it: its token, if any, is known to the operator. No operator knows
            a token made for the processes; the control server then makes its own, for the owner to find.
        asked: Whether the operator asked for a control server.
    """
    by_mlp = run.discovery.kind == "mlp" and not run.job.local
    model_dir = run.train.model_dir
    if not model_dir or not (asked or by_mlp):
        return None
    cluster = run.cluster
    security = run.security if is_guarded(run.security) else None
    if not by_mlp:
        return ControlPlace(ANY_PORT, security, tracer)
    if security is None:
        if filesystem.is_remote(model_dir):
            _log.warning(
                "this process has no control server: callers could read its token in %s. Give the run one "
                "with security.token_file.",
                model_dir,
            )
            return None
        security = SecurityConfig(token=control_token(model_dir))
    host, port = listen_address(run, environ)
    # What is no worker listens there already.
    return ControlPlace(concat_ip_and_port(host, port if cluster.role == "worker" else 0), security, tracer)


@contextmanager
def profiled_on_demand(place: ControlPlace | None, run: RunConfig, status: OwnStatus) -> Iterator[None]:
    """Let clients profile this process while the block lasts; for all but the chief, see `control_hooks`."""
    if place is None:
        yield
        return
    server = ControlServer({}, tracer=place.tracer, address=place.address, security=place.security)
    filesystem.make_dirs(run.train.model_dir)
    server.start(run.train.model_dir)
    status.control = lambda: server.address or ""
    try:
        yield
    finally:
        server.close()


def control_hooks(
    local: LocalRun, config: RunConfig, place: ControlPlace, status: OwnStatus, say: Callable[[str], None]
) -> list[Hook]:
    """Return the hooks that let an operator pause, resume, save, stop and profile the run, and pause its
    publishing."""
    assert local.save is not None  # there is a model_dir
    controller = ControllerHook(local.save.trigger_save)
    server = ControlServerHook(
        local.barrier,
        local.save.trigger_save,
        tracer=place.tracer,
        publish=None if local.publish is None else local.publish.execute,
        address=place.address,
        security=place.security,
        limits=config.limits,
    )
    status.control = lambda: server.address or ""
    return [
        BarrierHook(local.barrier, idle=[local.save.before_step]),
        controller,
        ActionFileHook(controller),
        server,
        _ReportAddress(server, say),
    ]


class _ReportAddress(Hook):
    def __init__(self, server: ControlServerHook, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say

    def after_create(self, run: TrainingRun) -> None:
        path = filesystem.join(run.model_dir, ACTION_FILE)
        self._say(f"control on {self._server.address}, and by the file {path}")
