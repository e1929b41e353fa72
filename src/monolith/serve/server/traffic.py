"""Traffic: which model and version answer a requested name, and which ones are mirrored to.

A split divides the requests for a name by weights. A request with a key (`split_key`, or a column that
`serve.split_columns` names) always goes to the same target: the hash of name and key is a place between 0 and
the sum of all weights.

    0                            90      100
    |──────── ads/120 ────────────|ads/140|          ann -> 12.7: ads/120     bob -> 93.1: ads/140

If weights change, only keys whose place changes hands go to another target.
"""

from __future__ import annotations

import random
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from monolith.errors import ConfigError
from monolith.serve.config import Route, RouteTarget
from monolith.table.hashing import mix_one


@dataclass(frozen=True, slots=True)
class _Split:
    """The targets of a name."""

    targets: tuple[RouteTarget, ...]
    ends: tuple[float, ...]
    """Where the share of each target ends."""

    @classmethod
    def of(cls, route: Route) -> _Split:
        return cls(route.targets, tuple(accumulate(target.weight for target in route.targets)))

    def at(self, fraction: float) -> RouteTarget:
        place = bisect_right(self.ends, fraction * self.ends[-1])
        return self.targets[min(place, len(self.targets) - 1)]


class TrafficRoutes:
    """Routes a requested name to a model and version, and picks its shadows. Thread-safe, never changes.

    Example: with the split `ads=ads/120:90,ads/140:10`, `target("ads", "")` returns ("ads", "120") for nine
    requests of ten; `target("ads", "140")` always returns ("ads", "140").

    Args:
        splits: Each name is answered by one of its targets, in proportion to their weights.
        shadows: Requests of each name are mirrored to its targets; the weight is the fraction of requests.
        models: Names of the served models; they need no route.
        generator: Random numbers for both.

    Raises:
        ConfigError: A route leads nowhere.
    """

    def __init__(
        self,
        splits: Sequence[Route],
        shadows: Sequence[Route],
        models: Sequence[str],
        generator: random.Random,
    ) -> None:
        self._random = generator
        self._routes = tuple(splits)
        self._models = tuple(models)
        self._splits = {one.name: _Split.of(one) for one in splits}
        self._shadow_routes = tuple(shadows)
        self._shadows = {one.name: one.targets for one in shadows}
        if len(self._splits) < len(splits) or len(self._shadows) < len(shadows):
            raise ConfigError("two routes have one name: list all of its targets in one, with their weights")
        for route in [*splits, *shadows]:
            for target in route.targets:
                if target.model not in models:
                    raise ConfigError(
                        f"route {route.name!r}: there is no model {target.model!r}; this server has "
                        f"{', '.join(models)}"
                    )
        for name in self._shadows:
            if name not in models and name not in self._splits:
                raise ConfigError(f"shadow of {name!r}: there is neither a model nor a split of that name")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._splits)

    def described(self) -> dict[str, str]:
        """Return for each name its targets as text, which `Route.parse` reads."""
        return {one.name: one.targets_text for one in self._routes}

    def with_split(self, name: str, route: Route | None) -> TrafficRoutes:
        """Return the same with other targets for a name, or none.

        Raises:
            ConfigError: A target leads nowhere, or a shadow would.
        """
        others = [one for one in self._routes if one.name != name]
        return TrafficRoutes(
            others if route is None else [*others, route], self._shadow_routes, self._models, self._random
        )

    def pinned(self) -> Mapping[str, frozenset[str]]:
        """Return for each model the versions that routes name."""
        found: dict[str, set[str]] = defaultdict(set)
        for route in (*self._routes, *self._shadow_routes):
            for target in route.targets:
                if target.version:
                    found[target.model].add(target.version)
        return {name: frozenset(versions) for name, versions in found.items()}

    def target(self, name: str, version: str, key: str = "") -> tuple[str, str]:
        """Return the model and version that answer. A client that names a version gets that version.

        Args:
            key: The same key always gets the same target, on every server; without one it is drawn.
        """
        split = self._splits.get(name)
        if split is None or version:
            return name, version
        if key:
            hashed = mix_one(zlib.crc32(f"{name}\0{key}".encode("utf-8", "backslashreplace")))
            chosen = split.at((hashed >> 11) * 2.0**-53)
        else:
            chosen = split.at(self._random.random())
        return chosen.model, chosen.version

    def main(self, name: str) -> tuple[str, str]:
        """Return the model and version with the largest weight; its metadata describes the name."""
        split = self._splits.get(name)
        if split is None:
            return name, ""
        heaviest = max(split.targets, key=lambda target: target.weight)
        return heaviest.model, heaviest.version

    def shadows(self, name: str) -> Sequence[RouteTarget]:
        """Return the targets that this request is mirrored to."""
        targets = self._shadows.get(name)
        if not targets:
            return ()
        return [one for one in targets if one.weight >= 1 or self._random.random() < one.weight]
