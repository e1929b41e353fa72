from pathlib import Path

import pytest

from monolith import filesystem
from monolith.errors import FileMissingError, FilesystemError
from monolith.filesystem import base_name, is_absolute, is_temporary, join, package_path, parent
from monolith.filesystem.paths import normal_url, temporary


@pytest.mark.parametrize(
    "path", ["/x", "/", "hdfs:/x", "hdfs:///x", "hdfs://host:9000/x", "s3://b/k", "simplecache::s3://b/k"]
)
def test_urls_and_rooted_paths_are_absolute(path):
    assert is_absolute(path)


@pytest.mark.parametrize(
    "path", ["", "x", "x/y", "./x", "../x", "hdfs", "hdfs:x", "model.ckpt-1", "a/s3://b"]
)
def test_everything_else_is_relative(path):
    assert not is_absolute(path)


@pytest.mark.parametrize(
    ("base", "parts", "expected"),
    [
        ("/a", ["b", "c"], "/a/b/c"),
        ("/a/", ["b"], "/a/b"),
        ("a", ["b"], "a/b"),
        ("", ["b"], "b"),
        ("/", ["b"], "/b"),
        ("s3://bucket", ["k"], "s3://bucket/k"),
        ("memory://", ["k"], "memory://k"),
        ("hdfs:/a", ["b"], "hdfs:/a/b"),
        ("/a", ["hdfs:/b"], "hdfs:/b"),
        ("s3://bucket", ["/b"], "/b"),
        ("/a", ["", "b"], "/a/b"),
        (Path("/a"), [Path("b")], "/a/b"),
    ],
)
def test_join_keeps_urls_and_starts_over_at_an_absolute_part(base, parts, expected):
    assert join(base, *parts) == expected


@pytest.mark.parametrize(
    ("path", "folder", "name"),
    [
        ("/a/b", "/a", "b"),
        ("/a/b/", "/a", "b"),
        ("/a", "/", "a"),
        ("/", "/", ""),
        ("a", "", "a"),
        ("a/b", "a", "b"),
        ("s3://bucket/k", "s3://bucket", "k"),
        ("s3://bucket", "s3://", "bucket"),
        ("hdfs:/x", "hdfs:/", "x"),
        ("hdfs:///x/y", "hdfs:///x", "y"),
    ],
)
def test_parent_and_base_name_split_urls_too(path, folder, name):
    assert parent(path) == folder
    assert base_name(path) == name


def test_a_temporary_name_is_next_to_its_path_and_recognised():
    name = temporary("/a/model.ckpt-3")
    assert name.startswith("/a/model.ckpt-3-tmp-")
    assert is_temporary(name)
    assert name != temporary("/a/model.ckpt-3")
    assert not is_temporary("/a/model.ckpt-3")
    assert not is_temporary("/a/x-tmp-notes/file")


def test_hdfs_with_one_slash_is_spelled_as_fsspec_expects():
    assert normal_url("hdfs:/a/b") == "hdfs:///a/b"
    assert normal_url("hdfs://host/a") == "hdfs://host/a"
    assert normal_url("/a") == "/a"


def test_package_path_is_the_absolute_path_of_a_shipped_file():
    path = Path(package_path("errors.py"))
    assert path.is_absolute()
    assert path.is_file()
    assert "monolith/" in str(path)


def test_package_path_says_where_it_looked():
    with pytest.raises(FileMissingError, match=r"no 'no_such\.so'; looked in /"):
        package_path("no_such.so")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd"])
def test_package_path_stays_inside_the_package(name):
    with pytest.raises(FilesystemError, match="stays inside"):
        package_path(name)


@pytest.mark.parametrize(
    ("path", "below"),
    [
        ("run/model.ckpt-1", True),
        ("run/a/../model.ckpt-1", True),
        ("run/not/yet/there", True),
        ("run", False),
        ("run/..", False),
        ("run/../other/x", False),
        ("runner/x", False),
        ("/etc/passwd", False),
        ("run/link/x", False),
        ("hdfs:///run/x", False),
    ],
)
def test_a_path_is_below_a_folder_only_where_it_ends_up_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, below: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("other").mkdir()
    Path("run/link").symlink_to(tmp_path / "other")
    assert filesystem.is_below(path, "run") is below
    if below and not path.startswith("hdfs"):
        assert filesystem.is_below(tmp_path / path, tmp_path / "run")


@pytest.mark.parametrize(
    ("path", "below"),
    [
        ("hdfs://one/run/model.ckpt-1", True),
        ("hdfs://one/run", False),
        ("hdfs://one/run/../x", False),
        ("hdfs://one/runner/x", False),
        ("hdfs://two/run/x", False),
        ("s3://one/run/x", False),
        ("/run/x", False),
    ],
)
def test_a_url_is_below_another_of_the_same_filesystem(path: str, below: bool) -> None:
    assert filesystem.is_below(path, "hdfs://one/run/") is below


def test_one_slash_or_three_make_no_difference_to_being_below() -> None:
    assert filesystem.is_below("hdfs:/run/x", "hdfs:///run")
