"""The dense half of a checkpoint: weights, optimizers and random numbers, in safetensors.

`tensors.files` has the format of a file; this package decides what of a model is saved, and how it is
restored when names or shapes have changed.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
