"""What a user writes or reads to train a model: tasks, metrics, evaluation and hooks."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
