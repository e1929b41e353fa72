"""A fleet: workers and parameter servers that train one model together."""
