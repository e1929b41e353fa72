"""The command line: reads the outside world, builds, runs. Nothing imports this room."""
