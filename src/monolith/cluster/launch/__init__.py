"""Starting the processes of a run, and seeing to it that none outlives the rest."""

from monolith.cluster.launch.processes import (
    LaunchOptions,
    LaunchOutcome,
    Member,
    job_members,
    launch,
    run_members,
)
from monolith.cluster.launch.ray import PLACEMENTS, RayLaunch, RayPlacement, launch_on_ray, run_members_on_ray

__all__ = [
    "PLACEMENTS",
    "LaunchOptions",
    "LaunchOutcome",
    "Member",
    "RayLaunch",
    "RayPlacement",
    "job_members",
    "launch",
    "launch_on_ray",
    "run_members",
    "run_members_on_ray",
]
