"""Starting the processes of a run, and seeing to it that none outlives the rest."""

from monolith.cluster.launch.processes import Member, Outcome, job_members, launch, run_members

__all__ = ["Member", "Outcome", "job_members", "launch", "run_members"]
