"""The dense half of a checkpoint: weights, optimizers and random numbers, in safetensors.

What a tensor file looks like, `tensors.files` says; here is what of a model goes into it, and how it finds
its way back when names or shapes have changed.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
