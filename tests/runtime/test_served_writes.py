"""A parameter server writes only where its run keeps its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.tasks import Clicks

from monolith.errors import RequestError, SaveError
from monolith.runtime.cluster_config import ClusterConfig
from monolith.runtime.messages import CALLS
from monolith.runtime.parameter_server import ServedShard
from monolith.train import TrainConfig
from monolith.wire.messages import typed_calls


def test_a_server_writes_only_below_the_model_dir_of_its_run(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model_dir, outside = tmp_path / "model", tmp_path / "outside"
    model_dir.mkdir()
    outside.mkdir()
    (model_dir / "link").symlink_to(outside)
    share = ServedShard(Clicks(), TrainConfig(model_dir=str(model_dir)), ClusterConfig(role="ps", num_ps=1))
    server = share.serve("127.0.0.1", 0, None)
    request.addfinalizer(server.close)
    calls = typed_calls(CALLS, {**share.calls, **share._jobs.calls})
    calls["server.begin"]({"run": "r"})
    calls["tables.cut"]({"run": "r", "cut": "c"})

    def write(prefix: object) -> object:
        job = calls["job.start"](
            {"work": "tables.write", "body": {"run": "r", "cut": "c", "prefix": prefix, "full": True}}
        )
        return calls["job.wait"]({**job, "wait": 20.0})["done"]

    for prefix in (
        outside / "x",
        model_dir / ".." / "outside" / "x",
        model_dir / "link" / "x",
        model_dir,
        "/x",
    ):
        with pytest.raises(SaveError, match="writes only below the model_dir of its run"):
            write(str(prefix))
    with pytest.raises(SaveError, match="writes only below"):
        write("hdfs://other/x")
    with pytest.raises(RequestError, match="prefix: expected str"):
        write(5)
    assert list(outside.iterdir()) == []
    assert write(str(model_dir / "model.ckpt-1")) is True
