"""Local and remote paths behind one interface, and writes that happen whole or not at all.

A path is a string: `/data/x`, `runs/x`, or any URL fsspec knows (`hdfs://`, `s3://`,
`gs://`, `memory://`). Every failure is a `FilesystemError` that names the path.
"""

from monolith.filesystem.copying import copy_file, copy_tree, link_or_copy
from monolith.filesystem.files import (
    FileReserve,
    atomic_write,
    exists,
    file_size,
    free_bytes,
    glob,
    is_folder,
    is_out_of_files,
    list_files,
    list_folders,
    make_dirs,
    open_database,
    open_read,
    read_bytes,
    remove,
    remove_tree,
    rename,
)
from monolith.filesystem.paths import (
    base_name,
    is_absolute,
    is_below,
    is_remote,
    is_temporary,
    join,
    package_path,
    parent,
    temporary,
)
from monolith.filesystem.private import new_folder, open_regular, private_folder, temporary_folder

__all__ = [
    "FileReserve",
    "atomic_write",
    "base_name",
    "copy_file",
    "copy_tree",
    "exists",
    "file_size",
    "free_bytes",
    "glob",
    "is_absolute",
    "is_below",
    "is_folder",
    "is_out_of_files",
    "is_remote",
    "is_temporary",
    "join",
    "link_or_copy",
    "list_files",
    "list_folders",
    "make_dirs",
    "new_folder",
    "open_database",
    "open_read",
    "open_regular",
    "package_path",
    "parent",
    "private_folder",
    "read_bytes",
    "remove",
    "remove_tree",
    "rename",
    "temporary",
    "temporary_folder",
]
