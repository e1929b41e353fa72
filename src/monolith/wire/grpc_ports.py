"""gRPC ports and channels: the package grpc, or that of a simulation.

A process that serves or asks over gRPC takes the package from here, when it needs it:

    grpc = import_grpc("serve", "serving over gRPC")
    server = grpc.server(ThreadPoolExecutor(8), interceptors=grpc_interceptors(guard))

A thread of a simulated machine receives `monolith.testing.grpc.SimGrpc` instead: the same statuses,
handlers and interceptors, with servers and channels that use the network of the simulation. So the code above
gRPC (what is admitted, retried, cancelled and drained) runs in a simulation as it ships. Packages that
coordinate processes import grpc in no other way; `tools/check_imports.py` refuses it.
"""

from __future__ import annotations

from typing import Any

from monolith.concurrency import machine
from monolith.errors import optional_package


def import_grpc(extra: str, purpose: str) -> Any:
    """Return the package grpc; on a simulated thread, what its machine has in place of it.

    Args:
        extra: The extra of this package that installs grpcio, for the error.
        purpose: What needs it.

    Raises:
        MissingExtraError: It is not installed.
    """
    if (here := machine()) is not None:
        return here.grpc
    with optional_package("grpcio", extra, purpose, "grpc"):
        import grpc  # type: ignore[import-untyped]
    return grpc
