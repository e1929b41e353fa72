"""Files as a source: found, shared out, put in order, read."""
