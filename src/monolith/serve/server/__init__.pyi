from monolith.serve.config import (
    BatchingConfig,
    Route,
    ServeConfig,
    ServedFolder,
    ServeLimits,
    VersionPolicy,
)
from monolith.serve.server.processes import ServerProcesses
from monolith.serve.server.server import InferenceServer

__all__ = [
    "BatchingConfig",
    "InferenceServer",
    "Route",
    "ServeConfig",
    "ServeLimits",
    "ServedFolder",
    "ServerProcesses",
    "VersionPolicy",
]
