"""Following: a served model that is brought up to date by what a trainer publishes."""

from monolith.serve.following.catalog import FollowingCatalog
from monolith.serve.following.config import ServeFollowConfig
from monolith.serve.following.followed_tables import FollowedTables
from monolith.serve.following.follower import ModelFollower
from monolith.serve.following.freshness import FollowMetrics
from monolith.serve.following.target import ServedTarget

__all__ = [
    "FollowMetrics",
    "FollowedTables",
    "FollowingCatalog",
    "ModelFollower",
    "ServeFollowConfig",
    "ServedTarget",
]
