"""Every implementation of the store seam, made the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monolith.store import LocalStore, Store
from monolith.table import DictTable, NativeTable, TableConfig

MakeStore = Callable[..., Store]


def _local(**options: Any) -> MakeStore:
    def make(configs: Mapping[str, TableConfig], **more: Any) -> Store:
        return LocalStore.from_configs(configs, **options, **more)

    return make


STORES: dict[str, MakeStore] = {
    "plain": _local(make_table=DictTable, threads=1),
    "local": _local(make_table=NativeTable, threads=1),
    "local, 2 threads": _local(make_table=NativeTable, threads=2),
}
