"""A consumer to be killed: keeps the ids it has read and its position in one file, replaced as a whole.

Run as a program it is a warm start: everything is imported once, and each consumer is a fork of it. It
takes one word a line: `start` forks a consumer, `kill` ends it with SIGKILL, `wait` waits until it ends by
itself. It answers each with a line: the exit code, or 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from services.kafka import CONSUMER_SETTINGS

from monolith.data.kafka import VALUE, ByWorker, KafkaConfig, create_plain_kafka_dataset


def consume(address: str, topic: str, state: Path) -> None:
    """Read the topic to its end, from where the last consumer saved."""
    config = KafkaConfig(
        servers=(address,),
        topics=(topic,),
        group="killed",
        assignment=ByWorker(worker=0, num_workers=1),
        poll_batch=4,
        batch_wait=timedelta(milliseconds=5),
        poll_timeout=timedelta(seconds=1),
        stream_timeout=timedelta(seconds=1),
        settings=CONSUMER_SETTINGS,
    )
    saved = json.loads(state.read_text()) if state.exists() else {"ids": [], "position": None}
    with create_plain_kafka_dataset(config) as source:
        if saved["position"] is not None:
            source.restore(saved["position"])
        for records in source:
            saved["ids"] += [int(text) for (text,) in records.strings(VALUE)]
            saved["position"] = source.position()
            part = state.with_suffix(".part")
            part.write_text(json.dumps(saved))
            part.replace(state)
            time.sleep(0.001)


def main(address: str, topic: str, state: Path) -> None:
    child = 0
    for line in sys.stdin:
        answer = 0
        if line == "start\n":
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    consume(address, topic, state)
                    status = 0
                finally:
                    os._exit(status)
        else:
            if line == "kill\n":
                os.kill(child, signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
