"""Training: tasks, the loop that runs them, and its hooks."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
