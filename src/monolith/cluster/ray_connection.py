"""Being connected to Ray, which a process is at most once.

Whoever finds the process unconnected connects it, and disconnects it in the end; others join in. What
`ray.init` does to the process beside that is taken back: it would set a handler for SIGTERM of its own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from monolith.cluster.addresses import Address, check_port
from monolith.errors import MissingExtraError, UnavailableError

AUTO = "auto"
"""The address of the cluster that RAY_ADDRESS names, or that runs on this machine."""

LOCAL = "local"
"""The address of a cluster that does not exist yet: of this machine, for as long as the connection lasts."""

_LISTENING_WITHIN = timedelta(seconds=10)


def import_ray(purpose: str) -> Any:
    """Return the package.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as cause:
        raise MissingExtraError("ray", "ray", purpose) from cause
    return ray


@contextmanager
def connected(
    purpose: str, address: str, *, cpus: int | None = None, runtime_env: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """Give the package, with this process connected; where it was before, all else is left as it is.

    Args:
        purpose: What Ray is needed for, in words.
        address: host:port of a cluster's head, ray://host:port of its client server, AUTO or LOCAL.
        cpus: Of a LOCAL cluster; by default those of this machine.
        runtime_env: What Ray takes to the machines, such as {"working_dir": "."}; see its documentation.

    Raises:
        AddressError: It is no address.
        MissingExtraError: Ray is not installed.
        UnavailableError: There is no such cluster, or it does not answer.
    """
    ray = import_ray(purpose)
    if ray.is_initialized():
        yield ray
        return
    if address not in (AUTO, LOCAL):
        listening = Address.parse(address.removeprefix("ray://"))
        # Ray itself would try for minutes, in a call that no signal interrupts.
        if not check_port(listening.host, listening.port, _LISTENING_WITHIN):
            raise _unavailable(purpose, address, f"nothing listens there after {_LISTENING_WITHIN}.")
    local = {"num_cpus": cpus, "include_dashboard": False}
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        ray.init(
            address,
            runtime_env=None if runtime_env is None else dict(runtime_env),
            log_to_driver=False,
            **(local if address == LOCAL else {}),
        )
    except (ConnectionError, TimeoutError, RuntimeError) as cause:
        raise _unavailable(purpose, address, str(cause)) from cause
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _unavailable(purpose: str, address: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"{purpose}: cannot connect to Ray at {address!r}: {why} `ray status` on its head says whether "
        "it runs; both sides need the same versions of Ray and Python."
    )
