"""A format of files in memory, for tests: lists of chunks of ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from monolith.data import BadRecord, Chunk, Format, RecordWriter
from monolith.data.formats.memory import to_records


class Chunks(Format):
    """Files that are lists of chunks; a chunk is a list of ids, and a text in it is a bad record."""

    name = "chunks"

    def __init__(self, files: dict[str, list[list[Any]]]) -> None:
        self.files = files
        self.opened: list[tuple[str, int]] = []
        self.open = self.most_open = self.loaded = 0

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        self.opened.append((path, start))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for place, chunk in enumerate(self.files[path][start:], start):
                ids = [one for one in chunk if isinstance(one, int)]
                self.loaded += len(ids)
                bad = [BadRecord(place, "a text", one.encode()) for one in chunk if isinstance(one, str)]
                records = to_records({"id": ids, "double": [2 * one for one in ids]})
                yield Chunk(records if columns is None else records.select(columns), place + 1, bad)
        finally:
            self.open -= 1

    @contextmanager
    def writer(self, path: str) -> Iterator[RecordWriter]:
        raise NotImplementedError(path)
        yield


class SplitChunks(Chunks):
    """The same, of which each chunk is a piece that can be read by itself."""

    def in_pieces(self, piece_bytes: int) -> SplitChunks:  # noqa: ARG002
        return self

    def bounds(self, path: str) -> list[int]:
        return list(range(len(self.files[path]) + 1)) if self.files[path] else []
