"""Sharded serving: rows spread over serving servers with replicas, and the entry's side of them."""

from monolith.serve.config import ShardsConfig
from monolith.serve.shards.protocol import shard_part, shard_role
from monolith.serve.shards.remote_rows import RemoteRows, ShardCounts, open_remote_rows
from monolith.serve.shards.serving_server import ServingServer, ServingServerConfig

__all__ = [
    "RemoteRows",
    "ServingServer",
    "ServingServerConfig",
    "ShardCounts",
    "ShardsConfig",
    "open_remote_rows",
    "shard_part",
    "shard_role",
]
