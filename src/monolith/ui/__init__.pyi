"""The page: what runs and servers say of themselves, drawn, live, in a browser of this machine.

with Page([source_of("runs/1"), source_of("http://127.0.0.1:8000")]) as page:
    print(page.address)
"""

from monolith.ui.board import PageSource
from monolith.ui.page import Page
from monolith.ui.sources import Feed, ProcessSource, source_of

__all__ = ["Feed", "Page", "PageSource", "ProcessSource", "source_of"]
