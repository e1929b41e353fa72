"""Discovery by TF_CONFIG: a scheduler such as Primus sets all addresses before any process starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from monolith.cluster.addresses import Address
from monolith.cluster.discovery import Callback, Closing, Registration
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.discovery import Role, Scheduler


class TfConfigDiscovery(Closing):
    """The roles of a TF_CONFIG: `{"cluster": {"chief": [...], "ps": [...], "worker": [...]}, "task": ...}`.

    The chief counts as worker 0 and moves the other workers up by one. Registering changes nothing.

    Raises:
        ConfigError: It is not of that shape.
        AddressError: One of its addresses is none.
    """

    def __init__(self, tf_config: Mapping[str, Any]) -> None:
        cluster, task = tf_config.get("cluster"), tf_config.get("task", {})
        if not isinstance(cluster, Mapping) or not isinstance(task, Mapping):
            raise ConfigError("TF_CONFIG must have a 'cluster' of roles and may have a 'task'")
        self._cluster: dict[str, list[str]] = {}
        for role, addresses in cluster.items():
            if not isinstance(addresses, Sequence) or isinstance(addresses, str):
                raise ConfigError(f"TF_CONFIG: cluster.{role} must be a list of addresses, got {addresses!r}")
            self._cluster[role] = [str(Address.parse(str(address))) for address in addresses]
        self._task = task
        self._closed = False

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what the environment's TF_CONFIG holds."""
        try:
            tf_config = json.loads(text)
        except ValueError as cause:
            raise ConfigError(f"TF_CONFIG is not JSON: {cause}") from cause
        if not isinstance(tf_config, dict):
            raise ConfigError(f"TF_CONFIG must be a JSON object, got {type(tf_config).__name__}")
        return cls(tf_config)

    @property
    def server_type(self) -> str:
        """The role of this process; the chief is a worker."""
        return "worker" if self._type == "chief" else self._type

    @property
    def index(self) -> int:
        """The index of this process as `query` counts it."""
        return self._index + (1 if self._type == "worker" and self._cluster.get("chief") else 0)

    @property
    def addr(self) -> str:
        """Where this process listens."""
        addresses = self._cluster.get(self._type, [])
        if self._index >= len(addresses):
            raise ConfigError(
                f"TF_CONFIG: the task is {self._type} {self._index}, but the cluster lists "
                f"{len(addresses)} of that type"
            )
        return addresses[self._index]

    def register(self, role: str, index: int, address: str) -> None:
        """Do nothing: the scheduler has registered all processes."""

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        """Do nothing."""

    def query(self, role: str) -> dict[int, str]:
        """Return the addresses of `ps` or `worker`.

        Raises:
            ConfigError: TF_CONFIG has no other roles.
        """
        if role not in ("ps", "worker"):
            raise ConfigError(f"name must be ps/worker, got {role!r}: TF_CONFIG has no other roles")
        if self._closed:
            return {}
        chief = self._cluster.get("chief", []) if role == "worker" else []
        return dict(enumerate([*chief, *self._cluster.get(role, [])]))

    def entries(self, role: str) -> list[Registration]:
        return [Registration(index, address) for index, address in self.query(role).items()]

    def roles(self) -> list[str]:
        return [role for role in ("ps", "worker") if self.query(role)]

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        """Call back once: nothing will change."""
        callback(self.query(role))
        return lambda: None

    def close(self) -> None:
        self._closed = True

    @property
    def _type(self) -> str:
        kind = self._task.get("type")
        if not isinstance(kind, str):
            raise ConfigError("TF_CONFIG has no task.type, so the role of this process is unknown")
        return kind

    @property
    def _index(self) -> int:
        index = self._task.get("index", 0)
        try:
            number = int(index)
        except (TypeError, ValueError):
            number = -1
        if number < 0:
            raise ConfigError(f"TF_CONFIG: task.index must be a number, 0 or more, got {index!r}")
        return number


class TfConfigScheduler(Scheduler):
    """Primus, Kubeflow and other systems that write TF_CONFIG into the environment of each process."""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return bool(environ.get("TF_CONFIG"))

    def role(self, config: RunConfig, environ: Mapping[str, str]) -> Role:  # noqa: ARG002
        found = TfConfigDiscovery.from_json(config.discovery.tf_config or "")
        return Role(
            kind=found.server_type,
            index=found.index,
            source="TF_CONFIG",
            address=found.addr,
            num_ps=len(found.query("ps")),
            num_workers=len(found.query("worker")),
        )

    def open(self, config: RunConfig, environ: Mapping[str, str]) -> TfConfigDiscovery:  # noqa: ARG002
        return TfConfigDiscovery.from_json(config.discovery.tf_config or "")

    def dispatcher_address(self, config: RunConfig, environ: Mapping[str, str]) -> str:  # noqa: ARG002
        found = TfConfigDiscovery.from_json(config.discovery.tf_config or "").query("dispatcher")
        if not found:
            raise ConfigError("data service: TF_CONFIG's cluster has no dispatcher")
        return found[min(found)]
