"""The dense half of a checkpoint: weights, optimizers and random numbers, in safetensors."""
