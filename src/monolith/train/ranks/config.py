"""What ranks exchange, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksConfig:
    """How ranks that train in step add up the gradients of the dense weights."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """What adds them up: gloo in the memory of the host, nccl on GPUs, one for each rank. Rows on GPUs are
    exchanged by the same."""
    bucket_bytes: int = 4 << 20
    """How many bytes of gradients are sent at a time, while backward computes the others; 0 sends those of
    each weight for themselves."""
    half_gradients: bool = False
    """Whether gradients are sent as half floats, at half the bytes; each is rounded to one part in 2,048."""
    skip_allreduce: bool = False
    """Whether gradients of dense weights are not added up at all. Then the weights of ranks drift apart, and
    those of rank 0 are saved: only to see what the exchange costs."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0:
            raise ConfigError(f"ranks: bucket_bytes must be 0 or more, got {self.bucket_bytes}")
