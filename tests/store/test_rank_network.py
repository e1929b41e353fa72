"""What groups of ranks need of a machine, before they are made."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch import distributed as dist

from monolith.errors import ConfigError
from monolith.store.rank_network import GroupOptions, TorchNetwork


def test_kernels_of_one_group_at_a_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would wait for each other forever, each in a call of another group."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    minute = timedelta(minutes=1)
    options = GroupOptions(host="127.0.0.1", connect=minute, timeout=minute, backend="nccl")
    with pytest.raises(ConfigError, match="Unset it"):
        TorchNetwork().make_group(dist.HashStore(), "lookups", 0, 2, options)
