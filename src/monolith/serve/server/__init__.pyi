from monolith.serve.server.config import (
    BatchingConfig,
    Route,
    ServeConfig,
    ServedFolder,
    ServeLimits,
    VersionPolicy,
)
from monolith.serve.server.peers import ServePeers
from monolith.serve.server.served import Catalog, ServedModel
from monolith.serve.server.server import InferenceServer

__all__ = [
    "BatchingConfig",
    "Catalog",
    "InferenceServer",
    "Route",
    "ServeConfig",
    "ServeLimits",
    "ServePeers",
    "ServedFolder",
    "ServedModel",
    "VersionPolicy",
]
