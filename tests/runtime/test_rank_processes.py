"""`monolith train --mode sync` by whoever starts the ranks: they find each other, end together, and go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import TalliedFiles, read_model
from services.mpi import mpirun, need_mpirun
from services.ray import RayCluster

from monolith.cli.main import main
from monolith.data.formats.memory import to_records
from monolith.data.formats.parquet import ParquetFormat
from monolith.runtime.attempts import rank_host
from monolith.runtime.config_loading import read_run

TESTS = Path(__file__).parents[1]

HIT = (
    f"""
import sys
sys.path.append({str(TESTS)!r})
"""
    + """
import os, signal
from pathlib import Path

from runtime.fleets import TalliedFiles as Files

from monolith.train import Hook, Mode


class Hit(Hook):
    \"\"\"Kills rank 1 at step 5, once: as another would.\"\"\"

    def __init__(self, mark):
        self.mark = mark

    def after_step(self, run, result):
        if run.step == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Struck(Files):
    def hooks(self, mode):
        mine = sys.argv[sys.argv.index("--cluster.index") + 1] if "--cluster.index" in sys.argv else None
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", mine)
        folder = Path(self.folder)
        if not (folder / f"{rank}.pid").exists():
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
        return [Hit(folder / "struck")] if rank == "1" else []
"""
)


class Struck:
    """A task in files whose rank 1 is killed once, and a model_dir."""

    def __init__(self, folder: Path) -> None:
        (folder / "mine.py").write_text(HIT)
        self.task = TalliedFiles(batches=36, folder=str(folder))
        self.task.write()
        self.folder = folder
        self.model_dir = folder / "model"

    def command(self, *flags: str) -> list[str]:
        return [
            *("train", f"{self.folder}/mine.py:Struck", "--mode", "sync", "--model-dir", str(self.model_dir)),
            *("--set", "batches=36", "--set", f"folder={self.folder}", "--save-steps", "2"),
            *("--train.save.asynchronous", "false"),
            *("--no-summaries", "--quiet", "--log-level", "info", "--threads", "1", *flags),
        ]

    def everything_once(self) -> bool:
        """Return whether each record was trained, and once, however unequal the shards of the ranks were."""
        tally = read_model(self.task, self.model_dir).tally
        return len(tally) == self.task.records and set(tally.values()) == {1.0}


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("ranks", "here", "flags", "host"),
    [
        ("2", "2", (), "127.0.0.1"),
        ("4", "2", (), "10.1.2.3"),
        ("4", "2", ("--cluster.listen", "10.9.9.9"), "10.9.9.9"),
    ],
)
def test_ranks_of_torchrun_listen_on_one_address_and_on_loopback_if_all_are_on_this_machine(
    ranks: str, here: str, flags: tuple[str, ...], host: str
) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": ranks, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": here}
    environ |= {"MASTER_ADDR": "m", "MASTER_PORT": "1", "CLOUDNATIVE_INET_ADDR": "10.1.2.3"}
    run = read_run(None, environ, flags=("--cluster.mode", "sync", "--train.model-dir", "m", *flags))
    assert rank_host(run, environ) == host


UNEQUAL = """
[data]
train = "data/*.parquet"

[features.user]
type = "IdFeature"

[labels.click]

[task]
batch_size = 64

[model]
type = "deepfm"
dim = 2
hidden = [2]
"""


def test_ranks_of_torchrun_train_every_record_of_unequal_files_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(UNEQUAL)
    (tmp_path / "data").mkdir()
    for number, size in enumerate((700, 100, 900)):
        users = torch.arange(size)
        with ParquetFormat().writer(str(tmp_path / "data" / f"{number}.parquet")) as writer:
            writer.write(to_records({"user": users, "click": (users % 3 == 0).float()}))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "monolith", "train", "--config", "run.toml", "--mode", "sync", "--model-dir", "model"),
        *("--no-summaries", "--threads", "1", "--json"),
    ]

    def train() -> dict[str, Any]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    first = train()
    assert (first["examples"], first["stop_reason"]) == (1700, "the data ended")
    assert train()["examples"] == 0, "nothing was left"


def test_ranks_of_mpirun_end_with_the_one_that_was_killed_and_resume_with_another_number(
    tmp_path: Path,
) -> None:
    need_mpirun()
    struck = Struck(tmp_path)
    status, said = mpirun(2, ["-m", "monolith", *struck.command()], cwd=tmp_path)
    assert (tmp_path / "struck").exists(), said
    assert status not in (0, 124), said
    assert not any(runs(int((tmp_path / f"{rank}.pid").read_text())) for rank in range(2))
    assert 0 < read_model(struck.task, struck.model_dir).step <= 5
    status, said = mpirun(3, ["-m", "monolith", *struck.command("--json")], cwd=tmp_path)
    assert status == 0, said
    assert not list(struck.model_dir.glob("mpirun/*")), "where they met is gone"
    assert struck.everything_once()


def test_a_rank_of_mpirun_that_fails_by_itself_ends_all_and_mpirun_has_its_status(tmp_path: Path) -> None:
    need_mpirun()
    struck = Struck(tmp_path)
    task = (
        (tmp_path / "mine.py")
        .read_text()
        .replace("os.kill(os.getpid(), signal.SIGKILL)", "raise KeyError('oops')")
    )
    (tmp_path / "mine.py").write_text(task)
    status, said = mpirun(2, ["-m", "monolith", *struck.command()], cwd=tmp_path)
    assert status == 2, said
    assert "oops" in said


def test_a_rank_on_ray_that_was_killed_is_restarted_and_all_resume(
    ray_cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    struck = Struck(tmp_path)
    on_ray = ("--launch", "ray", "--ray-address", ray_cluster.address, "--num-workers", "2", "--json")
    status = main(struck.command(*on_ray, "--failover.wait", "0.1s"))
    out, err = capsys.readouterr()
    assert status == 0, err
    assert (tmp_path / "struck").exists(), "rank 1 was killed"
    report = json.loads(out)
    assert report["restored_from"] is not None, "and all went on from the last checkpoint"
    assert report["step"] == 18
    assert struck.everything_once()
