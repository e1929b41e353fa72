"""MPI: the rank that mpirun gave this process, and the end of all ranks when one fails.

Open MPI sets variables OMPI_*; MPICH and its descendants (Intel MPI, Slurm) set PMI_*.

Ranks that step together wait for each other, so a rank that died leaves the rest waiting forever.
`abort_on_exception` ends all ranks after an uncaught exception, and `end_rank` ends them after an
error that a command has printed as one line; every `monolith` command uses both.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from monolith import filesystem
from monolith.cluster.discovery import Discovery
from monolith.cluster.files_discovery import FilesConfig, FilesDiscovery
from monolith.errors import ConfigError, optional_package
from monolith.runtime.config import RunConfig
from monolith.runtime.discovery import RankVariables, Scheduler, World, world_from_environment

_log = logging.getLogger(__name__)

MPI_VARIABLES: RankVariables = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
PMI_VARIABLES: RankVariables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_JOB_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID")


def world_of_mpi(environ: Mapping[str, str]) -> World | None:
    """Return the rank that mpirun gave this process; None if it did not start it.

    Raises:
        ConfigError: A variable is no number, or the numbers make no sense.
    """
    found = (World.from_variables(environ, names) for names in (MPI_VARIABLES, PMI_VARIABLES))
    return next((world for world in found if world is not None), None)


def world_or_alone(environ: Mapping[str, str]) -> World:
    """Return the rank that mpirun or torchrun gave this process, or else, with a warning, rank 0 of 1."""
    world = world_from_environment(environ)
    if world is None:
        _log.warning("this process was started neither by mpirun nor by torchrun; assuming rank 0 of 1")
        return World()
    return world


def world_from_mpi() -> World:
    """Ask MPI itself, which it starts if it has not been.

    Raises:
        MissingExtraError: mpi4py is not installed.
        ConfigError: It finds no MPI.
    """
    with optional_package("mpi4py", "mpi", "asking MPI for ranks"):
        try:
            from mpi4py import MPI
        except RuntimeError as cause:
            raise ConfigError(
                f"asking MPI for ranks: mpi4py is installed, and loads no MPI: {cause}"
            ) from cause
    everyone = MPI.COMM_WORLD
    here = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return World(everyone.Get_rank(), everyone.Get_size(), here.Get_rank(), here.Get_size())
    finally:
        here.Free()


def job_of_mpi(environ: Mapping[str, str]) -> str:
    """Return what tells this mpirun from others, in letters that a path may have; "0" if nothing does."""
    found = next((environ[name] for name in _JOB_VARIABLES if environ.get(name)), "0")
    return re.sub(r"[^A-Za-z0-9_-]", "-", found)


def abort_on_exception(
    environ: Mapping[str, str], abort: Callable[[int], object] | None = None
) -> Callable[[], None]:
    """Let an uncaught exception end all ranks: print rank and trace, and abort with status 1.

    Does nothing if mpirun did not start this process, or started it alone.

    Args:
        abort: Ends all ranks; by default MPI's own abort, if MPI runs in this process. Else the process
            exits, and mpirun then ends the other ranks.

    Returns:
        A function that undoes it.
    """
    world = world_of_mpi(environ)
    if world is None or world.size == 1:
        return lambda: None
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            text = "".join(traceback.format_exception(kind, error, trace))
            sys.stderr.write(f"rank {world.rank} of {world.size} failed; aborting all ranks:\n{text}")
            sys.stderr.flush()
        finally:
            (abort or _abort)(1)

    sys.excepthook = hook

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    return undo


def end_rank(environ: Mapping[str, str], status: int, abort: Callable[[int], object] | None = None) -> None:
    """End all ranks of mpirun with a status that is not 0. Returns if mpirun did not start several.

    A rank that failed must not wait for its own threads, as an interpreter does at its end: they may wait for
    other ranks, which wait for this one, and mpirun would never learn of the failure.

    Args:
        abort: As for `abort_on_exception`.
    """
    if status and (world := world_of_mpi(environ)) is not None and world.size > 1:
        sys.stderr.flush()
        (abort or _abort)(status)


def _abort(status: int) -> None:
    loaded: Any = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        loaded.COMM_WORLD.Abort(status)
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: that waits for threads, which may wait for other ranks


class MpiScheduler(Scheduler):
    """mpirun, which numbers ranks. Without another registry they meet in a folder of the model_dir."""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return any(environ.get(names[0]) for names in (MPI_VARIABLES, PMI_VARIABLES))

    def role(self, config: RunConfig, environ: Mapping[str, str]) -> None:
        """Return None: mpirun numbers ranks, and knows no other roles."""

    def world(self, environ: Mapping[str, str]) -> World | None:
        return world_of_mpi(environ)

    def listen_address(self, config: RunConfig, environ: Mapping[str, str]) -> str | None:  # noqa: ARG002
        """Return an address that no other machine reaches, if all ranks are on this machine."""
        world = world_or_alone(environ)
        return "127.0.0.1:0" if world.size == world.local_size else None

    @contextmanager
    def open(self, config: RunConfig, environ: Mapping[str, str]) -> Iterator[Discovery]:
        """Open the registry of the ranks of one mpirun: a folder, which rank 0 removes at its end.

        Raises:
            ConfigError: mpirun did not start this process, or the model_dir is no path of this machine.
        """
        model_dir = config.train.model_dir
        if not self.has_started(environ):
            raise ConfigError("discovery by mpi is for processes that mpirun started, and this one was not")
        if filesystem.is_remote(model_dir):
            raise ConfigError(
                f"the ranks of mpirun meet in a folder of the model_dir, and {model_dir} is remote. Say "
                "where rank 0 is, by `mpirun -x MASTER_ADDR=<host> -x MASTER_PORT=<port>`, or name "
                "a registry by discovery.kind"
            )
        folder = Path(model_dir) / "mpirun" / job_of_mpi(environ)
        try:
            with FilesDiscovery(FilesConfig(folder=str(folder))) as discovery:
                yield discovery
        finally:
            if config.cluster.role == "worker" and config.cluster.index == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def sets_variable(self, name: str) -> bool:
        return name in (*MPI_VARIABLES, *PMI_VARIABLES)

    def abort_on_exception(self, environ: Mapping[str, str]) -> None:
        abort_on_exception(environ)

    def end_ranks(self, environ: Mapping[str, str], status: int) -> None:
        end_rank(environ, status)
