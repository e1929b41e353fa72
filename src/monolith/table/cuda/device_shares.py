"""Device shares: how many bytes of a device each table of a model may use.

Room is given by the rows that tables say they will have (`initial_rows`), times the bytes of a row; those
that say nothing are taken to have as many as the others on average. No table gets more than its
`capacity_bytes`; what one cannot use the others share.
"""

from __future__ import annotations

from collections.abc import Mapping

from monolith.errors import ConfigError
from monolith.table.config import TableConfig
from monolith.table.cuda.layout import row_layout
from monolith.table.cuda.memory import BESIDE, KEYS, RECENCY_BYTES


def device_shares(configs: Mapping[str, TableConfig], total: int) -> dict[str, int]:
    """Return the bytes for each table, `total` together at most.

    Raises:
        ConfigError: They are too few for the smallest tables there are.
    """
    per_place = {name: row_layout(one).bytes_per_place + RECENCY_BYTES for name, one in configs.items()}
    said = [one.initial_rows for one in configs.values() if one.initial_rows]
    usual = max(1, sum(said) // len(said)) if said else 1
    weights = {name: (one.initial_rows or usual) * per_place[name] for name, one in configs.items()}
    shares: dict[str, int] = {}
    while open_names := [name for name in configs if name not in shares]:
        left = total - sum(shares.values())
        weight = sum(weights[name] for name in open_names)
        fair = {name: left * weights[name] // weight for name in open_names}
        bounded = {
            name: most
            for name in open_names
            if (most := configs[name].capacity_bytes) is not None and most <= fair[name]
        }
        shares |= bounded or fair
    for name, share in shares.items():
        least = (KEYS + BESIDE) * per_place[name]
        if share < least:
            raise ConfigError(
                f"of {total:,} bytes on a device for {len(configs)} tables {name!r} has {share:,}, and the "
                f"smallest table of such rows needs {least:,}; raise device_memory_bytes, or leave it out"
            )
    return shares
