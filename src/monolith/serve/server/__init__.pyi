from monolith.serve.config import (
    BatchingConfig,
    Route,
    ServeConfig,
    ServedFolder,
    ServeLimits,
    VersionPolicy,
)
from monolith.serve.server.processes import ServePeers
from monolith.serve.server.server import InferenceServer

__all__ = [
    "BatchingConfig",
    "InferenceServer",
    "Route",
    "ServeConfig",
    "ServeLimits",
    "ServePeers",
    "ServedFolder",
    "VersionPolicy",
]
