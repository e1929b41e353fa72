"""The folder of checkpoints: its state files, its lock, which are kept and which go."""
