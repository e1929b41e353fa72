"""Fixtures for all tests: real servers, started when first asked for."""

pytest_plugins = ("services.fixtures",)
