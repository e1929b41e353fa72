"""`monolith ui RUN|URL...`: runs and servers on a page in the browser, until told to stop."""

from __future__ import annotations

import os
from dataclasses import replace

from monolith.cli.data_service import reachable_host, say, told_to_stop
from monolith.cli.options.flags import guard_of, security_of
from monolith.cli.options.jobs import UiOptions
from monolith.cluster.security import SecurityConfig, ssl_context
from monolith.errors import ConfigError
from monolith.ui import Page


def run(options: UiOptions) -> int:
    """Show the page until told to stop."""
    if not options.sources:
        raise ConfigError("ui: name at least one run (its model_dir) or URL (http://host:port)")
    if options.every <= 0:
        raise ConfigError(f"ui: --every must be more than 0, got {options.every:g}")
    security = security_of(options.security, os.environ)
    guard = guard_of(options.security, options.host, os.environ)
    page = Page(
        options.sources,
        options.host,
        options.port,
        guard=guard,
        context=ssl_context(security, server=True),
        source_security=shown_to_sources(options, security),
        every=options.every,
    )
    with told_to_stop(os.environ) as stop, page:
        address = str(page.address).replace(options.host, reachable_host(options.host, None), 1)
        say(f"page     {address}")
        if guard.token is not None:
            say("token    the page asks for it")
        if options.open:
            import webbrowser

            webbrowser.open(address)
        stop.wait()
    return 0


def shown_to_sources(options: UiOptions, security: SecurityConfig) -> SecurityConfig:
    """Return what the page shows to runs and servers: its own certificate and token, or another token."""
    if options.source_token_file is None:
        return security
    return replace(security, token=None, token_file=options.source_token_file)
