"""Traffic: who answers a name that callers ask for, and who is asked beside, without being heard."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from monolith.errors import ConfigError
from monolith.serve.server.config import Route, RouteTarget


class TrafficRoutes:
    """Chooses. Thread-safe.

    Args:
        splits: Each name is answered by one of its targets, by chance, in proportion to their weights.
        shadows: Each target is asked, too, for the share of requests that its weight says.
        models: Names that need no route.
        generator: Draws.
    """

    def __init__(
        self,
        splits: Sequence[Route],
        shadows: Sequence[Route],
        models: Sequence[str],
        generator: random.Random,
    ) -> None:
        self._random = generator
        self._splits = {one.name: one.targets for one in splits}
        self._weights = {one.name: list(accumulate(t.weight for t in one.targets)) for one in splits}
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
        """Names that only a split answers to."""
        return tuple(self._splits)

    def pinned(self) -> Mapping[str, frozenset[str]]:
        """Return for each model the versions that routes name."""
        found: dict[str, set[str]] = defaultdict(set)
        for targets in [*self._splits.values(), *self._shadows.values()]:
            for target in targets:
                if target.version:
                    found[target.model].add(target.version)
        return {name: frozenset(versions) for name, versions in found.items()}

    def target(self, name: str, version: str) -> tuple[str, str]:
        """Return the model and version that answer. A caller who names a version gets that one."""
        targets = self._splits.get(name)
        if targets is None or version:
            return name, version
        chosen: RouteTarget = self._random.choices(targets, cum_weights=self._weights[name])[0]
        return chosen.model, chosen.version

    def main(self, name: str) -> tuple[str, str]:
        """Return the model and version that answer the most, for who asks what a name takes."""
        targets = self._splits.get(name)
        if targets is None:
            return name, ""
        heaviest = max(targets, key=lambda target: target.weight)
        return heaviest.model, heaviest.version

    def shadows(self, name: str) -> Sequence[RouteTarget]:
        """Return who is asked beside, this time."""
        targets = self._shadows.get(name)
        if not targets:
            return ()
        return [one for one in targets if one.weight >= 1 or self._random.random() < one.weight]
