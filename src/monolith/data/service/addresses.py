"""Where the dispatcher is, for whoever was started by a scheduler and told by its environment.

On MLP every role has variables of its own: MLP_DISPATCHER_0_PRIMARY_HOST, or _0_HOST, and
MLP_DISPATCHER_0_PORT. A dispatcher that is found in another way is given as a function that
returns its address: `monolith.cluster.locator` makes one of a discovery.
"""

from __future__ import annotations

from collections.abc import Mapping

from monolith.errors import ConfigError

DEFAULT_PORT = 2222
"""What MLP means where it names none."""


def dispatcher_from_environment(environment: Mapping[str, str], role: str = "dispatcher") -> str:
    """Return "host:port" of the dispatcher that MLP's variables name.

    Raises:
        ConfigError: They name none, or a port that is no number.
    """
    prefix = f"MLP_{role.upper()}_0"
    names = (f"{prefix}_PRIMARY_HOST", f"{prefix}_HOST")
    host = next((text for name in names if (text := _unquoted(environment.get(name, "")))), None)
    if host is None:
        raise ConfigError(
            f"data service: the environment has neither {names[0]} nor {names[1]}; name the dispatcher"
        )
    port = _unquoted(environment.get(f"{prefix}_PORT", "")) or str(DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"data service: {prefix}_PORT must be a port, got {port!r}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")
