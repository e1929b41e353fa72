"""Who answers a name, by weight, and who is asked beside."""

import random
from collections import Counter

import pytest

from monolith.errors import ConfigError
from monolith.serve.config import Route, RouteTarget, ServeConfig, VersionPolicy
from monolith.serve.server.inference import TrafficRoutes


def routes(splits=(), shadows=()):
    return TrafficRoutes(
        [Route.parse(one) for one in splits],
        [Route.parse(one) for one in shadows],
        ["ads", "feed"],
        random.Random(1),
    )


def test_a_route_is_a_name_and_targets_with_weights():
    assert Route.parse("ads=ads/120:90,feed") == Route(
        "ads", (RouteTarget("ads", "120", 90), RouteTarget("feed", "", 1))
    )


@pytest.mark.parametrize(
    "text", ["", "ads", "ads=", "=ads", "ads=a b", "ads=ads:x", "ads=ads:1.2.3", "ads=ads:0"]
)
def test_what_is_no_route_is_refused(text):
    with pytest.raises(ConfigError, match="route"):
        Route.parse(text)


@pytest.mark.parametrize("text", ["", "newest", "latest:0", "latest:-1", "specific:", "all:1"])
def test_what_is_no_policy_is_refused(text):
    with pytest.raises(ConfigError, match="version policy"):
        VersionPolicy.parse(text)


def test_requests_are_split_by_weight():
    traffic = routes(["ads=ads/1:75,ads/2:25"])
    counts = Counter(traffic.target("ads", "") for _ in range(4000))
    assert set(counts) == {("ads", "1"), ("ads", "2")}
    assert 2850 < counts["ads", "1"] < 3150
    assert traffic.main("ads") == ("ads", "1")
    assert traffic.pinned() == {"ads": {"1", "2"}}


def test_a_request_that_names_a_version_gets_it():
    assert routes(["ads=ads/1:75,ads/2:25"]).target("ads", "7") == ("ads", "7")


def test_a_name_without_a_route_is_the_model():
    assert routes().target("ads", "") == ("ads", "")


def test_shadows_are_asked_for_their_share():
    traffic = routes(shadows=["ads=feed:0.5"])
    asked = sum(len(traffic.shadows("ads")) for _ in range(4000))
    assert 1850 < asked < 2150
    assert not traffic.shadows("feed")
    assert len(routes(shadows=["ads=feed"]).shadows("ads")) == 1


@pytest.mark.parametrize(
    ("splits", "shadows", "says"),
    [
        (["x=nobody"], [], "nobody"),
        (["x=ads", "x=feed"], [], "two routes"),
        ([], ["x=ads"], "neither a model nor a split"),
    ],
)
def test_routes_that_lead_nowhere_are_refused(splits, shadows, says):
    with pytest.raises(ConfigError, match=says):
        routes(splits, shadows)


def test_a_share_of_more_than_all_is_refused():
    with pytest.raises(ConfigError, match="at most 1"):
        ServeConfig(shadows=("ads=ads:2",))
