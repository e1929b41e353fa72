"""The row that `monolith serve` suggests to ask with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from serve.served_tasks import SPEC

from monolith.serve.request_reader import RequestReader
from monolith.serve.server.catalog import example_row


def test_a_row_that_is_made_up_is_one_that_the_server_accepts() -> None:
    reader = RequestReader(SPEC, kinds={"history": "list", "item": "scalar"})
    model = SimpleNamespace(version="1", signature=SimpleNamespace(inputs=reader.inputs))
    row = example_row("nowhere", cast(Any, model))
    assert (row["where"], row["history"], row["item"]) == ([0.5, 0.5], [1], 1)
    assert len(reader.batch({name: [value] for name, value in row.items()})) == 1
