"""Hooks that tell: lines, summaries, metrics, profiles and dumps of what a run does."""
