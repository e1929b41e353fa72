"""Files as a source: found, shared out, put in order, read."""

from monolith.data.files.bad_records import BadRecordPolicy
from monolith.data.files.discovery import Watch, find_files, gen_patterns, matching_patterns
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import FileQueue, LocalFileQueue

__all__ = [
    "BadRecordPolicy",
    "FileQueue",
    "FileSource",
    "LocalFileQueue",
    "SharedFileQueue",
    "Watch",
    "find_files",
    "gen_patterns",
    "matching_patterns",
]
