import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from services.mpi import mpirun, need_mpirun

from monolith.errors import ConfigError
from monolith.runtime.config_loading import load_run_config, read_run
from monolith.runtime.discovery import (
    World,
    discovery_defaults,
    is_restarted_by_launcher,
    keys_are_named,
    listen_address,
    open_discovery,
    world_from_environment,
)
from monolith_compat.mpi import (
    MPI_VARIABLES,
    MpiScheduler,
    abort_on_exception,
    end_rank,
    job_of_mpi,
    world_or_alone,
)

MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
BOTH_HERE = dict(zip(MPI_VARIABLES, ("0", "2", "0", "2"), strict=True))
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KEYS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2950"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_mpirun_and_torchrun_say_which_rank_this_is():
    assert world_from_environment(MPI) == World(3, 4, 1, 2)
    assert world_from_environment(TORCHRUN) == World(5, 8, 1, 4)
    assert world_from_environment({**MPI, **TORCHRUN}) == World(3, 4, 1, 2)
    assert world_from_environment(PMI) == World(1, 2, 1, 2)
    assert world_from_environment({"PMI_RANK": "1", "PMI_SIZE": "2"}) == World(1, 2, 0, 1)


def test_mpirun_sets_the_registry_and_mlp_comes_before_it():
    assert discovery_defaults(MPI) == discovery_defaults(PMI) == {"discovery.kind": "mpi"}
    assert discovery_defaults({**MPI, "MLP_ROLE": "worker"}) == {"discovery.kind": "mlp"}


def test_processes_that_mpirun_does_not_know_inherit_none_of_its_variables():
    assert [name for name in (*MPI, *PMI, *TORCHRUN) if MpiScheduler().sets_variable(name)] == [*MPI, *PMI]


def test_each_mpirun_is_told_from_others_by_a_word_that_a_path_may_have():
    assert job_of_mpi({"OMPI_MCA_ess_base_jobid": "14315"}) == "14315"
    assert job_of_mpi({"PMIX_NAMESPACE": "prterun-host-7@1", "PMI_JOBID": "3"}) == "prterun-host-7-1"
    assert job_of_mpi({}) == "0"


@pytest.mark.parametrize(
    ("environ", "named"),
    [({**MPI, **KEYS}, True), ({**TORCHRUN, **KEYS}, True), (MPI, False), (KEYS, False), (TORCHRUN, False)],
)
def test_ranks_meet_where_the_launcher_says_if_it_does(environ, named):
    assert keys_are_named(environ) == named


@pytest.mark.parametrize(
    ("environ", "restarted"),
    [({**MPI, **KEYS}, True), (MPI, True), (PMI, True), ({**TORCHRUN, **KEYS}, True), ({}, False)],
)
def test_a_launcher_that_restarts_all_ranks_leaves_no_rank_waiting(environ, restarted):
    assert is_restarted_by_launcher(environ) == restarted


def test_without_a_launcher_there_is_no_world_or_one_of_one_with_a_warning(caplog):
    assert world_from_environment({}) is None
    assert world_or_alone({}) == World(0, 1, 0, 1)
    assert "rank 0 of 1" in caplog.text


@pytest.mark.parametrize("rank", ["x", "4", "-1"])
def test_ranks_that_make_no_sense_are_refused(rank):
    with pytest.raises(ConfigError):
        world_from_environment({**MPI, "OMPI_COMM_WORLD_RANK": rank})


def test_ranks_of_mpirun_meet_in_a_folder_of_the_model_dir_that_is_gone_after_them(tmp_path):
    environ = {**BOTH_HERE, "OMPI_MCA_ess_base_jobid": "77"}
    run = read_run(None, environ, flags=("--cluster.mode", "sync", "--train.model-dir", str(tmp_path)))
    assert (run.discovery.kind, run.cluster.num_workers) == ("mpi", 2)
    assert listen_address(run, environ) == ("127.0.0.1", 0), "all are on this machine"
    with open_discovery(run, environ) as one, open_discovery(_as_rank(run, 1), environ) as other:
        one.register("rank", 0, "127.0.0.1:1")
        assert other.query("rank") == {0: "127.0.0.1:1"}
        assert (tmp_path / "mpirun" / "77" / "rank" / "0").exists()
    assert not list((tmp_path / "mpirun").iterdir())
    away = listen_address(run, {**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "YARN_INET_ADDR": "10.0.0.7"})
    assert away == ("10.0.0.7", 0)


def _as_rank(run, rank):
    return replace(run, cluster=replace(run.cluster, index=rank))


def test_where_ranks_of_mpirun_cannot_meet_says_what_to_do():
    config = load_run_config(code={"discovery_type": "mpi", "model_dir": "hdfs://there/m"})
    with pytest.raises(ConfigError, match="-x MASTER_ADDR"), open_discovery(config, BOTH_HERE):
        pass
    with pytest.raises(ConfigError, match="this one was not"), open_discovery(config, {}):
        pass


def test_another_registry_may_be_named_for_ranks_of_mpirun():
    flags = ("--cluster.mode", "sync", "--discovery.kind", "files", "--discovery.folder", "f")
    run = read_run(None, {"PMI_RANK": "1", "PMI_SIZE": "2"}, flags=(*flags, "--train.model-dir", "m"))
    assert (run.discovery.kind, run.cluster.index) == ("files", 1)


def test_mpi_itself_is_asked_or_named_as_missing():
    code = "from monolith_compat.mpi import world_from_mpi; print(world_from_mpi())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "rank=0, size=1" in done.stdout or "monolith-recsys[mpi]" in done.stderr


FAILING = """
import os, threading, time
from monolith_compat.mpi import abort_on_exception

abort_on_exception(os.environ)
threading.Thread(target=time.sleep, args=(60,)).start()  # as one that waits for other ranks
raise ValueError("boom")
"""


def test_an_exception_under_mpi_prints_rank_and_trace_and_ends_the_process_at_once():
    done = subprocess.run(
        [sys.executable, "-c", FAILING], env=MPI, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "rank 3 of 4 failed; aborting all ranks" in done.stderr
    assert "ValueError: boom" in done.stderr


def test_the_hook_aborts_all_ranks_and_can_be_undone(capsys):
    before = sys.excepthook
    aborted: list[int] = []
    undo = abort_on_exception(MPI, abort=aborted.append)
    try:
        assert sys.excepthook is not before
        error = ValueError("boom")
        sys.excepthook(ValueError, error, None)
    finally:
        undo()
    assert aborted == [1]
    assert "rank 3" in capsys.readouterr().err
    assert sys.excepthook is before


def test_importing_installs_no_hook_and_none_is_installed_elsewhere_than_among_ranks_of_mpi():
    before = sys.excepthook
    abort_on_exception({})
    abort_on_exception(TORCHRUN)
    abort_on_exception({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    assert sys.excepthook is before


def test_a_command_that_failed_ends_all_ranks_of_mpi_and_no_other_process():
    ended: list[int] = []
    end_rank({}, 2, ended.append)
    end_rank(TORCHRUN, 2, ended.append)
    end_rank({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 2, ended.append)
    end_rank(MPI, 0, ended.append)
    assert ended == []
    end_rank(MPI, 2, ended.append)
    end_rank(PMI, 3, ended.append)
    assert ended == [2, 3]


ONE_FAILS = """
import os
import threading
import time
from pathlib import Path

from monolith.errors import ConfigError


class Bug(BaseException): ...


def task():
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    Path(f"{rank}.pid").write_text(str(os.getpid()))
    if rank == "1":
        while not Path("0.pid").exists():
            time.sleep(0.01)
        # As one that waits for other ranks: an interpreter that ends waits for it.
        threading.Thread(target=threading.Event().wait).start()
        raise %s("boom")
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("error", "status", "said"), [("ConfigError", 2, "monolith: boom"), ("Bug", 1, "Bug")]
)
def test_one_rank_that_fails_ends_mpirun_and_all_its_ranks(error, status, said, tmp_path: Path):
    need_mpirun()
    (tmp_path / "tasks.py").write_text(ONE_FAILS % error)
    assert (ended := mpirun(2, ["-m", "monolith", "train", "tasks.py:task"], cwd=tmp_path))[0] == status
    assert said in ended[1]
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{rank}.pid").read_text()), 0)
