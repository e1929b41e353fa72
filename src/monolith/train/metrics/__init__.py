"""Metrics of training: what is measured, over which window, and the AUC natively."""
