import contextlib
import errno
import io
import os
import resource
import signal
import subprocess
import sys
import textwrap

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from monolith.errors import FileMissingError, FilesystemError
from monolith.filesystem import (
    FileReserve,
    atomic_write,
    base_name,
    exists,
    glob,
    is_folder,
    is_temporary,
    join,
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
from monolith.filesystem.backends import LocalBackend, filesystem_error


def put(path: str, data: bytes) -> str:
    with atomic_write(path) as file:
        file.write(data)
    return path


def write_then_raise(path: str, error: BaseException) -> None:
    with atomic_write(path) as file:
        file.write(b"half")
        raise error


def test_what_was_written_is_read_back(folder):
    path = put(join(folder, "x"), b"abc")
    assert read_bytes(path) == b"abc"
    with open_read(path) as file:
        assert file.read(2) == b"ab"
    assert list_files(folder) == [path]


def test_a_write_replaces_the_file_that_was_there(folder):
    path = put(join(folder, "x"), b"old")
    put(path, b"new")
    assert read_bytes(path) == b"new"


def test_until_the_block_ends_the_old_file_is_there_whole(folder):
    path = put(join(folder, "x"), b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert read_bytes(path) == b"old"
        assert [is_temporary(each) for each in list_files(folder)] == [False, True]
    assert read_bytes(path) == b"new"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), ConnectionResetError("peer")])
def test_a_failed_block_changes_nothing_and_its_error_passes_through(folder, error):
    path = put(join(folder, "x"), b"old")
    with pytest.raises(type(error)) as raised:
        write_then_raise(path, error)
    assert raised.value is error
    assert read_bytes(path) == b"old"
    assert list_files(folder) == [path]


def test_a_block_may_close_its_file(folder):
    path = join(folder, "x")
    with atomic_write(path) as file:
        file.write(b"abc")
        file.close()
    assert read_bytes(path) == b"abc"


def test_a_name_with_brackets_is_not_a_pattern(folder):
    path = put(join(folder, "user[age]*"), b"1")
    put(path, b"2")
    assert read_bytes(path) == b"2"


def test_writing_into_a_missing_folder_says_to_make_it(tmp_path):
    with pytest.raises(FileMissingError, match="make its folder first"):
        put(str(tmp_path / "no" / "x"), b"")


def test_reading_a_missing_file_names_it_and_is_a_file_not_found_error(folder):
    path = join(folder, "no")
    with pytest.raises(FileMissingError, match="no") as raised:
        read_bytes(path)
    assert isinstance(raised.value, FileNotFoundError)
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(FileMissingError):
        open_read(path)


def test_listing_separates_files_and_folders(folder):
    make_dirs(join(folder, "b", "c"))
    make_dirs(join(folder, "b", "c"))
    top, deep = put(join(folder, "x"), b""), put(join(folder, "b", "c", "y"), b"")
    assert list_files(folder) == [top]
    assert list_files(folder, recursive=True) == sorted([top, deep])
    assert list_folders(folder) == [join(folder, "b")]
    assert is_folder(join(folder, "b"))
    assert not is_folder(top)


def test_listing_what_is_not_a_folder_is_an_error(folder):
    with pytest.raises(FileMissingError):
        list_files(join(folder, "no"))
    with pytest.raises(FilesystemError):
        list_files(put(join(folder, "x"), b""))


def test_listing_counts_links_by_what_they_point_to(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "d").mkdir()
    (tmp_path / "to_f").symlink_to("f")
    (tmp_path / "to_d").symlink_to("d")
    assert [base_name(p) for p in list_files(tmp_path)] == ["f", "to_f"]
    assert [base_name(p) for p in list_folders(tmp_path)] == ["d", "to_d"]


def test_glob_finds_sorted_paths_that_can_be_read_again(folder):
    for name in ["a.ckpt", "b.ckpt", "c.txt"]:
        put(join(folder, name), name.encode())
    found = glob(join(folder, "*.ckpt"))
    assert [read_bytes(path) for path in found] == [b"a.ckpt", b"b.ckpt"]
    assert glob(join(folder, "*.no")) == []


def test_relative_paths_stay_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put("x", b"1")
    assert list_files("") == ["x"]
    assert glob("*") == ["x"]
    assert exists("x")


def test_a_file_url_is_the_local_disk(tmp_path):
    put(f"file://{tmp_path}/x", b"1")
    assert read_bytes(tmp_path / "x") == b"1"
    assert read_bytes(f"file:{tmp_path}/x") == b"1"


def test_removing_a_file_and_a_tree(folder):
    path = put(join(folder, "x"), b"")
    make_dirs(join(folder, "b"))
    put(join(folder, "b", "y"), b"")
    remove(path)
    remove_tree(join(folder, "b"))
    assert not exists(path)
    assert not exists(join(folder, "b", "y"))


def test_removing_what_is_gone_is_fine_unless_asked(folder):
    remove(join(folder, "no"))
    remove_tree(join(folder, "no"))
    with pytest.raises(FileMissingError):
        remove(join(folder, "no"), missing_ok=False)
    with pytest.raises(FileMissingError):
        remove_tree(join(folder, "no"), missing_ok=False)


def test_rename_replaces_a_file(folder):
    old, new = put(join(folder, "old"), b"1"), put(join(folder, "new"), b"2")
    rename(old, new)
    assert read_bytes(new) == b"1"
    assert not exists(old)


def test_rename_moves_a_folder(folder):
    make_dirs(join(folder, "old"))
    put(join(folder, "old", "x"), b"1")
    rename(join(folder, "old"), join(folder, "new"))
    assert list_files(join(folder, "new")) == [join(folder, "new", "x")]


def test_rename_of_nothing_and_across_filesystems_is_refused(tmp_path):
    with pytest.raises(FileMissingError, match="it does not exist"):
        rename(tmp_path / "no", tmp_path / "x")
    put(str(tmp_path / "x"), b"")
    with pytest.raises(FilesystemError, match="different filesystems"):
        rename(tmp_path / "x", "memory://x")


def test_an_unknown_protocol_says_which_are_known():
    with pytest.raises(FilesystemError, match=r"nosuch.*hdfs://"):
        exists("nosuch://x")


def test_a_protocol_whose_package_is_absent_says_what_to_install():
    fsspec.register_implementation(
        "cloudtest", "no_such_module.Clouds", clobber=True, errtxt="Install `clouds` to access Clouds"
    )
    with pytest.raises(FilesystemError, match=r"cloudtest:// needs a package.*Install `clouds`"):
        exists("cloudtest://x")


class FullFile(io.BytesIO):
    def write(self, _data) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class FullFilesystem(MemoryFileSystem):
    protocol = "fulltest"
    store: dict = {}  # noqa: RUF012  fsspec keeps it on the class
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False

    def open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            super().open(path, mode, **kwargs).close()
            return FullFile()
        return super().open(path, mode, **kwargs)


@pytest.fixture
def full_disk():
    fsspec.register_implementation("fulltest", FullFilesystem, clobber=True)
    FullFilesystem.store.clear()
    return "fulltest://d"


def test_a_full_disk_is_named_with_advice_and_leaves_nothing(full_disk):
    with pytest.raises(FilesystemError, match=r"cannot write fulltest://d/x: .*disk is full") as raised:
        put(join(full_disk, "x"), b"abc")
    assert raised.value.errno == errno.ENOSPC
    assert isinstance(raised.value.__cause__, OSError)
    assert FullFilesystem.store == {}


def test_a_local_file_past_the_limit_is_our_error_and_leaves_nothing(tmp_path):
    program = """
        import resource, sys
        from monolith.errors import FilesystemError
        from monolith.filesystem import atomic_write
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            with atomic_write(sys.argv[1]) as file:
                file.write(bytes(100_000))
        except FilesystemError as error:
            print(error)
    """
    done = run_program(program, str(tmp_path / "x"))
    assert done.returncode == 0, done.stderr
    assert "cannot write" in done.stdout
    assert "ulimit -f" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_kill_in_the_middle_leaves_only_a_temporary_name(tmp_path):
    program = """
        import os, signal, sys
        from monolith.filesystem import atomic_write
        with atomic_write(sys.argv[1]) as file:
            file.write(bytes(100_000))
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_program(program, str(tmp_path / "x"))
    assert done.returncode == -signal.SIGKILL
    [left] = list_files(tmp_path)
    assert is_temporary(left)


def run_program(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EACCES, "owner and mode"),
        (errno.EPERM, "owner and mode"),
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_each_cause_has_its_own_advice(code, advice):
    error = filesystem_error("write", "/data/x", OSError(code, os.strerror(code)))
    assert str(error).startswith(f"cannot write /data/x: {os.strerror(code)}. ")
    assert advice in str(error)
    assert error.errno == code


def test_a_folder_that_may_not_be_written_is_our_error(tmp_path, monkeypatch):
    def refuse(_self, path):
        raise PermissionError(errno.EACCES, "Permission denied", path)  # as root no mode would

    monkeypatch.setattr(LocalBackend, "create", refuse)
    with pytest.raises(FilesystemError, match=r"Permission denied\. Check the owner"):
        put(str(tmp_path / "x"), b"")


def test_a_failed_rename_removes_the_temporary_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = put(str(tmp_path / "x"), b"old")

    def refuse(_self, _source, _target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(LocalBackend, "rename", refuse)
    with pytest.raises(FilesystemError, match="read-only"):
        put(path, b"new")
    assert read_bytes(path) == b"old"
    assert list_files(tmp_path) == [path]


def test_a_file_is_synced_before_it_gets_its_name_and_the_folder_after(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b))[1])
    put(str(tmp_path / "x"), b"abc")
    assert order == ["sync", "rename", "sync"]


def test_a_store_that_will_not_rename_onto_a_file_is_helped():
    class Stubborn(MemoryFileSystem):
        protocol = "stubborn"
        store: dict = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012
        cachable = False

        def mv(self, path1, path2, **kwargs):
            if self.exists(path2):
                raise FileExistsError(path2)
            super().mv(path1, path2, **kwargs)

    fsspec.register_implementation("stubborn", Stubborn, clobber=True)
    put("stubborn://d/x", b"old")
    put("stubborn://d/x", b"new")
    assert read_bytes("stubborn://d/x") == b"new"
    assert len(list_files("stubborn://d")) == 1


def test_importing_the_room_imports_no_fsspec():
    done = run_program("import sys, monolith.filesystem; print('fsspec' in sys.modules)")
    assert done.stdout.strip() == "False"


# Files in reserve


def test_a_reserve_that_is_given_up_lets_files_be_opened_when_there_are_none_left(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserve = FileReserve(8)
    with contextlib.ExitStack() as taken:
        taken.callback(reserve.close)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        path = tmp_path / "checkpoint"
        with pytest.raises(FilesystemError, match="too many files open"), atomic_write(path) as file:
            file.write(b"saved")
        with reserve.given_up(), atomic_write(path) as file:
            file.write(b"saved")
        with pytest.raises(OSError, match="Too many open files"):  # it was taken back
            os.open(os.devnull, os.O_RDONLY)
    assert path.read_bytes() == b"saved"


def test_a_database_is_for_its_owner_alone_and_is_kept_in_its_file(tmp_path):
    path = tmp_path / "jobs.db"
    with contextlib.closing(open_database(path)) as database:
        database.execute("CREATE TABLE t (n INTEGER)")
        database.execute("INSERT INTO t VALUES (7)")
    assert path.stat().st_mode & 0o077 == 0
    with contextlib.closing(open_database(path)) as database:
        assert database.execute("SELECT n FROM t").fetchall() == [(7,)]


def test_a_database_that_is_not_on_a_local_disk_is_refused():
    with pytest.raises(FilesystemError, match="a database needs a local disk"):
        open_database("memory://jobs.db")
