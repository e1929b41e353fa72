"""What each command takes. Light: `--help` must not wait for torch."""
