"""Sync: what training changes, numbered, for whoever follows.

A holder of rows publishes what changed in its share every fraction of a second; servers and standbys read it
from where they are.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
