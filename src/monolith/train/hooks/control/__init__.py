"""Hooks that start, hold and stop a run: operators, alerts, hours of the day, barriers."""
