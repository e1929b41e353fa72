"""A real browser without a screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from services.servers import need

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser, as playwright has it; skip a test where there is none, and on CI fail it."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    need(find_spec("playwright") is not None, "playwright")
    need(path is not None, "chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, which a container often is, it does without its sandbox; it is shown our own page only.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
