"""Sync: changed rows as numbered deltas, from publishers to subscribers.

Each process with rows publishes the changes of its shard every fraction of a second; serving servers and
standbys read them from their own position.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
