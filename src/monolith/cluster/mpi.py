"""MPI and torchrun: which rank this is, and what happens to the other ranks when it fails.

Open MPI sets variables OMPI_*; MPICH and its descendants (Intel MPI, Slurm) set PMI_*.

Ranks that step together wait for each other, so a rank that died leaves the rest waiting forever.
`abort_on_exception` ends all ranks after an uncaught exception, and `end_rank` ends them after an
error that a command has printed as one line; every `monolith` command uses both.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from monolith.errors import ConfigError, MissingExtraError

_log = logging.getLogger(__name__)

MPI_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
PMI_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_JOB_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID")


@dataclass(frozen=True, slots=True)
class World:
    """One process's place among the ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank among the processes on this machine."""
    local_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or not 0 <= self.local_rank < self.local_size:
            raise ConfigError(
                f"invalid ranks: rank {self.rank} of {self.size}, here {self.local_rank} of {self.local_size}"
            )


def world_from_environment(environ: Mapping[str, str]) -> World | None:
    """Return the place that mpirun or torchrun gave this process; None if neither started it.

    If both have set variables, those of mpirun count: its processes may have inherited torchrun's.

    Raises:
        ConfigError: A variable is no number, or the numbers make no sense.
    """
    for rank, size, local_rank, local_size in (MPI_VARIABLES, PMI_VARIABLES, TORCHRUN_VARIABLES):
        if environ.get(rank):
            return World(
                _number(environ, rank, 0),
                _number(environ, size, 1),
                _number(environ, local_rank, 0),
                _number(environ, local_size, 1),
            )
    return None


def world_or_alone(environ: Mapping[str, str]) -> World:
    """Return `world_from_environment`, or else, with a warning, a world of one."""
    world = world_from_environment(environ)
    if world is None:
        _log.warning("this process was started neither by mpirun nor by torchrun; assuming rank 0 of 1")
        return World()
    return world


def world_from_mpi() -> World:
    """Ask MPI itself, which it starts if it has not been.

    Raises:
        MissingExtraError: mpi4py is not installed, or finds no MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as cause:
        raise MissingExtraError("mpi4py", "mpi", "asking MPI for ranks") from cause
    everyone = MPI.COMM_WORLD
    here = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return World(everyone.Get_rank(), everyone.Get_size(), here.Get_rank(), here.Get_size())
    finally:
        here.Free()


def is_under_mpi(environ: Mapping[str, str]) -> bool:
    """Whether mpirun started this process."""
    return any(environ.get(variables[0]) for variables in (MPI_VARIABLES, PMI_VARIABLES))


def job_of_mpi(environ: Mapping[str, str]) -> str:
    """Return what tells this mpirun from others, in letters that a path may have; "0" if nothing does."""
    found = next((environ[name] for name in _JOB_VARIABLES if environ.get(name)), "0")
    return re.sub(r"[^A-Za-z0-9_-]", "-", found)


def keys_are_named(environ: Mapping[str, str]) -> bool:
    """Whether ranks need no registry to find each other: a launcher has numbered them, and variables name the
    address at which all of them share keys, as those of torchrun do."""
    named = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    return named and world_from_environment(environ) is not None


def is_restarted_by_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a rank that lost another is to end: torchrun and mpirun end all ranks then, and start again all
    of them or none."""
    return is_under_mpi(environ) or keys_are_named(environ)


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
    world = world_from_environment(environ) if is_under_mpi(environ) else None
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
    if status and is_under_mpi(environ) and world_or_alone(environ).size > 1:
        sys.stderr.flush()
        (abort or _abort)(status)


def _abort(status: int) -> None:
    loaded: Any = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        loaded.COMM_WORLD.Abort(status)
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: that waits for threads, which may wait for other ranks


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"the environment's {name} must be a number, got {text!r}") from None
