"""Hooks that save: when it is time, what is told of it, and the checkpoint itself."""
