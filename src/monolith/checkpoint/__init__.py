"""Checkpoints: everything a run needs to resume, committed together.

checkpointer = Checkpointer(Saver("runs/1"), [TablesPart(tables), DensePart(model, [optimizer])])
checkpointer.save(step)
checkpointer.restore(prefix)
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
