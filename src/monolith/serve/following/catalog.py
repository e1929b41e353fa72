"""Versions of servables that follow a trainer while they are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from monolith.errors import ConfigError
from monolith.serve.following.follower import ModelFollower
from monolith.serve.predictor import Predictor
from monolith.serve.server.config import VersionPolicy
from monolith.serve.server.served import Catalog, ServedModel

MakeFollower = Callable[[str], ModelFollower]
"""Makes who follows for the model of a folder."""


class FollowingCatalog:
    """A catalog whose versions are brought up to date.

    Args:
        versions: Finds and loads them.
        follower: Asked once for each folder, when its first version is loaded.
    """

    def __init__(self, versions: Catalog, follower: MakeFollower) -> None:
        self._versions = versions
        self._make = follower
        self._followers: dict[str, ModelFollower] = {}

    @property
    def followers(self) -> dict[str, ModelFollower]:
        """By folder."""
        return dict(self._followers)

    def versions(self, folder: str) -> Sequence[str]:
        return self._versions.versions(folder)

    def withheld(self, folder: str, versions: Sequence[str]) -> Mapping[str, str]:
        return self._versions.withheld(folder, versions)

    def load(self, folder: str, version: str) -> ServedModel:
        model = self._versions.load(folder, version)
        if not isinstance(model, Predictor):
            raise ConfigError(
                f"version {version} of {folder} is served by {type(model).__name__}, and only a "
                "Predictor can follow a trainer"
            )
        try:
            follower = self._followers.get(folder)
            if follower is None:
                follower = self._followers[folder] = self._make(folder)
            follower.attach(model)
        except BaseException:
            model.close()
            raise
        return model

    def close(self) -> None:
        """Stop following."""
        for follower in self._followers.values():
            follower.close()


def check_policy(policy: VersionPolicy, *, routed: bool) -> None:
    """Refuse to follow with more than one version of a model.

    Raises:
        ConfigError: The policy, or a route, serves several.
    """
    if policy.newest != 1 and len(policy.named) != 1:
        raise ConfigError(
            "serve --follow: a model that follows is what the trainer has now, so it has one version: leave "
            "--version-policy at latest"
        )
    if routed:
        raise ConfigError(
            "serve --follow: a split or shadow by version would make all of them alike; start another server "
            "for versions as they were exported"
        )
