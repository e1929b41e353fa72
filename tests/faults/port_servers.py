"""Every server of a run in one process, for `port_fuzzer` to throw messages at.

python -m faults.port_servers FOLDER

Prints one line of JSON, the address of each, and ends with its standard input.
"""

from __future__ import annotations

import json
import logging
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from data.service.processes import CONFIG, open_split
from serve.shards.shard_folders import write_shards
from sync.delta_channels import SmallPublisher
from train.runs import FakeRun
from train.tasks import Clicks

from monolith.cluster.security import Guard, SecurityConfig
from monolith.config import Secret
from monolith.data.service import DataWorker, DataWorkerConfig, Dispatcher
from monolith.observe import Metrics
from monolith.runtime.cluster_config import ClusterConfig
from monolith.runtime.parameter_server import ServedShard
from monolith.runtime.publish_shard import PublishPlan
from monolith.serve.shards import ServingServer, ServingServerConfig
from monolith.store import ParameterServer
from monolith.sync import MemoryChannel, PublishConfig
from monolith.sync.flight_channel import DeltaPort, ReaderLimits
from monolith.train import TrainConfig
from monolith.train.hooks import ControlServerHook, LocalBarrier
from monolith.wire.ports import Limits

TOKEN = "only-for-tests"
LIMITS = Limits(wait=timedelta(milliseconds=20), call_bytes=1 << 20, message_bytes=16 << 20, ids=1 << 16)


def saved() -> Future[str | None]:
    future: Future[str | None] = Future()
    future.set_result("model.ckpt-1")
    return future


def serve(folder: str, stack: ExitStack) -> dict[str, str]:
    """Start all of them, and return their addresses."""
    job = replace(CONFIG, lease=timedelta(seconds=600))
    dispatcher = stack.enter_context(Dispatcher(job, folder=f"{folder}/job", limits=LIMITS))
    worker = stack.enter_context(
        DataWorker(dispatcher.address, open_split, DataWorkerConfig(chunk_records=5), limits=LIMITS)
    )
    config, channel = TrainConfig(model_dir=f"{folder}/model"), MemoryChannel()
    plan = PublishPlan(config=PublishConfig(to="memory"), run="r", open_writer=lambda _: channel.writer())
    share = ServedShard(Clicks(), config, ClusterConfig(role="ps", num_ps=1, num_workers=2), publish=plan)
    stack.callback(share.close_publishing)
    parameters = stack.enter_context(share.serve("127.0.0.1", 0, None, LIMITS))
    guarded = stack.enter_context(
        ParameterServer([], shard=(0, 1), guard=Guard(token=Secret(TOKEN)), limits=LIMITS)
    )
    write_shards(Path(folder, "export"), shards=1)
    serving = stack.enter_context(ServingServer(f"{folder}/export", 0, ServingServerConfig(limits=LIMITS)))
    control = ControlServerHook(
        LocalBarrier(1), saved, security=SecurityConfig(token=Secret(TOKEN)), limits=LIMITS, grace=0.1
    )
    control.after_create(FakeRun(f"{folder}/control", step=7))
    stack.callback(control.close)
    metrics = stack.enter_context(Metrics().serve(0))
    deltas = DeltaPort(limits=LIMITS, reader_limits=ReaderLimits(readers=1 << 20, snapshots=1 << 20))
    stack.callback(deltas.close)
    SmallPublisher(deltas.writer()).publish(range(100))
    assert control.address is not None
    return {
        "dispatcher": dispatcher.address,
        "worker": worker.address,
        "parameters": parameters.address,
        "guarded": guarded.address,
        "serving": serving.address,
        "control": control.address,
        "metrics": f"{metrics.address}:{metrics.port}",
        "deltas": deltas.address,
    }


def main(folder: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    with ExitStack() as stack:
        sys.stdout.write(json.dumps(serve(folder, stack)) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
