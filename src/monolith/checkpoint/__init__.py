"""Checkpoints: everything a run needs to go on, committed together."""
