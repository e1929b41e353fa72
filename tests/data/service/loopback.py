"""The data service on loopback: data workers and trainers in few words, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from datetime import timedelta

from data.service.processes import open_split, start

from monolith.data.service import DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher

SOON = timedelta(seconds=20)


def add_worker(stack: ExitStack, dispatcher: Dispatcher | str, **options) -> DataWorker:
    names = {field.name for field in fields(DataWorkerConfig)}
    reading = {"chunk_records": 5, **{name: options.pop(name) for name in names & options.keys()}}
    address = dispatcher if isinstance(dispatcher, str) else dispatcher.address
    return stack.enter_context(DataWorker(address, open_split, DataWorkerConfig(**reading), **options))


def add_process(stack: ExitStack, *arguments: str):
    process, line = start(*arguments)

    def end() -> None:
        process.kill()
        process.wait()
        process.stdout.close()

    stack.callback(end)
    return process, line


def trainer(dispatcher: Dispatcher | str, name: str = "one", **options) -> DataServiceSource:
    address = dispatcher if isinstance(dispatcher, str) else dispatcher.address
    return DataServiceSource(address, name, **{"patience": SOON, "prefetch": 2, **options})


def numbers(some) -> list[int]:
    return some["id"].flat_values.tolist()


def read(source: DataServiceSource) -> list[int]:
    return [number for some in source for number in numbers(some)]


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for what another thread or process does."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.01)
