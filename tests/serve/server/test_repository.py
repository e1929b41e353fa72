"""Versions come and go while others answer."""

import threading

import pytest
from serve.server.linear import LinearCatalog, LinearModel

from monolith.errors import CorruptFileError, UnavailableError, UnknownModelError
from monolith.serve.config import BatchingConfig, ServedFolder, ServeLimits, VersionPolicy
from monolith.serve.server.batching import RequestBatcher
from monolith.serve.server.repository import RETRY_AFTER, Repository


class Repo(Repository):
    """With a clock that a test sets."""

    def __init__(self, catalog, policy="latest", pinned=()):
        self.now = 0.0
        folder = ServedFolder(folder="f", name="ads", policy=VersionPolicy.parse(policy))
        super().__init__(
            [folder],
            catalog,
            lambda _name, model, _statistics: RequestBatcher(
                model.predict, BatchingConfig(), limits=ServeLimits(), clock=lambda: self.now
            ),
            pinned={"ads": frozenset(pinned)},
            clock=lambda: self.now,
        )


def catalog_of(*versions):
    return LinearCatalog({"f": {version: lambda v=version: LinearModel("ads", v) for version in versions}})


def add(catalog, version, make=None):
    catalog.folders["f"][version] = make or (lambda: LinearModel("ads", version))


def test_the_newest_version_is_warmed_up_and_served():
    catalog = catalog_of("9", "10")
    repository = Repo(catalog)
    repository.refresh()
    assert repository.versions("ads") == ("10",)
    assert [model.warmed for model in catalog.loaded] == [1]
    with repository.lease("ads") as held:
        assert held.model.version == "10"


def test_a_new_version_takes_over_and_the_old_one_is_closed_by_its_last_user():
    catalog = catalog_of("1")
    repository = Repo(catalog)
    repository.refresh()
    with repository.lease("ads") as old:
        add(catalog, "2")
        repository.refresh()
        with repository.lease("ads") as new:
            assert new.model.version == "2"
        assert not old.model.closed
        assert repository.retiring == 1
    assert old.model.closed
    assert not new.model.closed
    assert repository.retiring == 0


@pytest.mark.parametrize(
    ("policy", "serves"),
    [
        ("latest", ("3",)),
        ("latest:2", ("2", "3")),
        ("all", ("1", "2", "3")),
        ("specific:1,3,7", ("1", "3")),
    ],
)
def test_the_policy_says_which_versions_are_served(policy, serves):
    repository = Repo(catalog_of("1", "2", "3"), policy)
    repository.refresh()
    assert repository.versions("ads") == serves
    with repository.lease("ads", serves[0]) as held:
        assert held.model.version == serves[0]


def test_versions_that_routes_name_are_served_next_to_the_newest():
    repository = Repo(catalog_of("1", "2", "3"), pinned=["1"])
    repository.refresh()
    assert repository.versions("ads") == ("1", "3")


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_in_place():
    catalog = catalog_of("1")
    repository = Repo(catalog)
    repository.refresh()

    def torn():
        attempts.append(repository.now)
        if len(attempts) < 3:
            raise CorruptFileError("f/2/dense", 7, "torn")
        return LinearModel("ads", "2")

    attempts = []
    add(catalog, "2", torn)
    repository.refresh()
    repository.refresh()
    assert attempts == [0]  # not again at every look
    assert repository.versions("ads") == ("1",)
    assert [(line.version, line.state) for line in repository.index()] == [
        ("1", "READY"),
        ("2", "UNAVAILABLE"),
    ]
    assert "torn" in repository.index()[1].reason
    repository.now = RETRY_AFTER
    repository.refresh()
    assert repository.versions("ads") == ("1",)
    with repository.lease("ads") as held:
        assert not held.model.closed
    repository.load("ads")  # asked to: at once
    assert repository.versions("ads") == ("2",)
    assert repository.index()[0].state == "READY"


def test_a_version_that_fails_to_warm_up_is_closed():
    class Cold(LinearModel):
        def warm_up(self):
            raise ValueError("no such op")

    catalog = catalog_of()
    add(catalog, "1", Cold)
    repository = Repo(catalog)
    repository.refresh()
    assert catalog.loaded[0].closed
    assert not repository.all_ready
    with pytest.raises(UnavailableError, match="no version of it is loaded"), repository.lease("ads"):
        pass
    with pytest.raises(UnavailableError, match="no such op"):
        repository.load("ads")


def test_an_unloaded_model_stays_so_until_it_is_loaded():
    catalog = catalog_of("1")
    repository = Repo(catalog)
    repository.refresh()
    repository.unload("ads")
    assert catalog.loaded[0].closed
    repository.refresh()
    with pytest.raises(UnavailableError, match="unloaded"), repository.lease("ads"):
        pass
    assert [(line.state, line.reason) for line in repository.index()] == [("UNAVAILABLE", "unloaded")]
    assert repository.all_ready  # nobody wants it to be
    repository.load("ads")
    assert repository.is_ready("ads")


def test_one_version_is_unloaded_and_the_others_still_answer():
    catalog = catalog_of("1", "2")
    repository = Repo(catalog, policy="all")
    repository.refresh()
    repository.unload("ads", "2")
    repository.refresh()
    assert repository.versions("ads") == ("1",)
    assert [model.closed for model in catalog.loaded] == [False, True]
    assert [(line.version, line.state, line.reason) for line in repository.index()] == [
        ("1", "READY", ""),
        ("2", "UNAVAILABLE", "unloaded"),
    ]
    with pytest.raises(UnknownModelError, match="no version '2'"):
        repository.unload("ads", "2")
    repository.unload("ads", "1")
    repository.refresh()
    assert repository.versions("ads") == ()
    repository.load("ads")
    assert repository.versions("ads") == ("1", "2")


def test_an_older_version_takes_the_place_of_one_that_was_unloaded():
    repository = Repo(catalog_of("1", "2"))
    repository.refresh()
    repository.unload("ads", "2")
    assert repository.versions("ads") == ("1",)


def test_names_that_are_not_served_are_unknown():
    repository = Repo(catalog_of("1"))
    repository.refresh()
    for name, version in (("adz", ""), ("ads", "7")):
        with pytest.raises(UnknownModelError), repository.lease(name, version):
            pass
    for call in (repository.load, repository.unload, repository.versions):
        with pytest.raises(UnknownModelError, match="adz"):
            call("adz")


def test_a_folder_that_cannot_be_read_for_a_moment_changes_nothing(monkeypatch):
    catalog = catalog_of("1")
    repository = Repo(catalog)
    repository.refresh()

    def gone(folder):  # noqa: ARG001
        raise OSError("stale handle")

    monkeypatch.setattr(catalog, "versions", gone)
    repository.refresh()
    assert repository.versions("ads") == ("1",)


def test_versions_switch_under_load_and_no_request_meets_a_closed_one():
    catalog = catalog_of("1")
    repository = Repo(catalog)
    repository.refresh()
    stop = threading.Event()
    answered = [0] * 4
    errors = []

    def ask(number):
        while not stop.is_set():
            try:
                with repository.lease("ads") as held:
                    held.model.predict({"user": [b"a"]})
                answered[number] += 1
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for version in range(2, 60):
        add(catalog, str(version))
        repository.refresh()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert all(answered)
    assert [model.closed for model in catalog.loaded] == [True] * 58 + [False]
    repository.close()
    assert catalog.loaded[-1].closed


def test_a_rollback_serves_one_freshly_loaded_version_until_told_otherwise():
    catalog = catalog_of("1", "2")
    repository = Repo(catalog)
    repository.refresh()
    with repository.lease("ads") as newest:
        repository.serve_only("ads", "1")
        assert not newest.model.closed
    assert newest.model.closed
    add(catalog, "3")
    repository.refresh()
    assert repository.versions("ads") == ("1",)
    with repository.lease("ads") as first:
        repository.serve_only("ads", "1")  # what it was told since is left behind
        with repository.lease("ads") as again:
            assert (again.model.version, again.model.warmed) == ("1", 1)
            assert again.model is not first.model
    assert first.model.closed
    repository.serve_only("ads", None)
    assert repository.versions("ads") == ("3",)


def test_going_back_to_what_is_not_there_or_does_not_load_changes_nothing():
    catalog = catalog_of("1", "2")
    repository = Repo(catalog)
    repository.refresh()

    def broken():
        raise CorruptFileError("f/1", 7, "torn")

    add(catalog, "1", broken)
    with pytest.raises(UnknownModelError, match="no version '9'; in f there are 1, 2"):
        repository.serve_only("ads", "9")
    with pytest.raises(UnavailableError, match=r"version 1: .*torn"):
        repository.serve_only("ads", "1")
    with pytest.raises(UnknownModelError, match="no model 'cars'"):
        repository.serve_only("cars", "1")
    add(catalog, "3")
    repository.refresh()
    assert repository.versions("ads") == ("3",)


def test_a_version_that_is_withheld_while_it_answers_gives_way_to_the_last_good_one(caplog):
    catalog = catalog_of("1", "2")
    repository = Repo(catalog)
    repository.refresh()
    catalog.marks = {"2": "labels went wrong"}
    add(catalog, "3")
    catalog.marks["3"] = "labels went wrong"
    repository.refresh()
    repository.refresh()
    assert repository.versions("ads") == ("1",)
    lines = {line.version: (line.state, line.reason) for line in repository.index()}
    assert lines["3"] == ("UNAVAILABLE", "withheld: labels went wrong")
    assert caplog.text.count("version 2 is withheld and not served: labels went wrong") == 1
    catalog.marks = {}
    repository.refresh()
    assert repository.versions("ads") == ("3",)


def test_a_route_does_not_serve_a_withheld_version_and_a_rollback_to_it_does():
    catalog = catalog_of("1", "2")
    catalog.marks = {"2": "labels went wrong"}
    repository = Repo(catalog, pinned=("2",))
    repository.refresh()
    assert repository.versions("ads") == ("1",)
    repository.serve_only("ads", "2")
    assert repository.versions("ads") == ("2",)


def test_a_server_whose_only_version_is_withheld_keeps_answering_and_says_so(caplog):
    catalog = catalog_of("1")
    repository = Repo(catalog)
    repository.refresh()
    catalog.marks = {"1": "labels went wrong"}
    repository.refresh()
    repository.refresh()
    assert repository.versions("ads") == ("1",)
    assert caplog.text.count("there is no other version to serve") == 1
