"""Joining streams: a record waits for what belongs to it."""
