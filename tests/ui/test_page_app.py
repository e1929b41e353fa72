"""Who may see the page, and who may press its buttons."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from ui.sample import SampleRun, sample_sources

from monolith.errors import ConfigError, ListenError
from monolith.ui import Page
from monolith.ui.page import FILES, MOST_BODY

PATIENCE = 60.0


@pytest.fixture(scope="module")
def shown() -> Iterator[tuple[Page, SampleRun]]:
    run, sources = sample_sources()
    with Page(sources, every=0.05) as page:
        yield page, run


@pytest.fixture(scope="module")
def page(shown: tuple[Page, SampleRun]) -> Page:
    return shown[0]


def ask(
    page: Page, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(page), timeout=PATIENCE)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, text, sent)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def port_of(page: Page) -> int:
    return int(str(page.address).rpartition(":")[2].strip("/"))


def press(page: Page, verb: str, body: Any, **headers: str) -> tuple[int, str]:
    usual = {"X-Monolith-Page": "1", "Content-Type": "application/json"}
    usual |= {name.replace("_", "-"): value for name, value in headers.items()}
    path = "/splits/set" if verb == "split" else f"/publish/{verb}"
    status, _, said = ask(page, "POST", path, body, **usual)
    return status, json.loads(said).get("error", "")


# Looking


@pytest.mark.parametrize("path", FILES)
def test_the_page_is_there_and_takes_nothing_from_elsewhere(page: Page, path: str) -> None:
    status, headers, body = ask(page, "GET", path)
    assert status == 200
    assert body
    assert headers["content-type"] == FILES[path][1]
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    assert not [word for word in (b"http://", b"https://") if word in body.replace(b"http://www.w3.org", b"")]


def test_all_there_is_can_be_had_once(page: Page) -> None:
    status, _, body = ask(page, "GET", "/state")
    assert status == 200
    assert [one["name"] for one in json.loads(body)["sources"]] == ["online", "frozen", "ads"]


def test_what_is_new_comes_as_server_sent_events(shown: tuple[Page, SampleRun]) -> None:
    page, run = shown
    connection = http.client.HTTPConnection("127.0.0.1", port_of(page), timeout=PATIENCE)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    seen = []
    run.problem = "down for a test"
    try:
        while not any("down for a test" in text for text in seen):
            line = answer.readline().decode()
            assert line.startswith(("data: {", "\n", ":"))
            seen.append(line)
        run.problem = None
        while '"error":"down for a test"' in (line := answer.readline().decode()) or not line.startswith(
            "data"
        ):
            seen.append(line)
    finally:
        run.problem = None
        connection.close()
    first = json.loads(seen[0].removeprefix("data: "))
    assert set(first) == {"time", "sources", "curves"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../pyproject.toml", 404),
        ("GET", "/static/page.js", 404),
        ("POST", "/", 405),
        ("POST", "/events", 405),
        ("GET", "/publish/hold", 405),
        ("OPTIONS", "/publish/hold", 405),
        ("OPTIONS", "/state", 405),
    ],
)
def test_there_is_nothing_else(page: Page, method: str, path: str, status: int) -> None:
    found, headers, _ = ask(page, method, path)
    assert found == status
    assert "access-control-allow-origin" not in headers


# Hostile callers


@pytest.mark.parametrize("path", ["/", "/state", "/events", "/page.js"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "a b",
        "",
        "[::1",
        "@localhost",
    ],
)
def test_a_name_that_is_not_of_this_machine_is_refused(page: Page, path: str, host: str) -> None:
    assert ask(page, "GET", path, Host=host)[0] in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:80", "127.0.0.5", "[::1]:80"])
def test_names_of_this_machine_are_taken(page: Page, host: str) -> None:
    assert ask(page, "GET", "/state", Host=host)[0] == 200


def test_a_request_with_two_hosts_or_none_is_refused(page: Page) -> None:
    for head in (b"Host: localhost\r\nHost: evil.example\r\n", b""):
        with socket.create_connection(("127.0.0.1", port_of(page)), timeout=PATIENCE) as line:
            line.sendall(b"GET /state HTTP/1.1\r\n" + head + b"Connection: close\r\n\r\n")
            assert b" 403 " in line.recv(1000).splitlines()[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_site_can_neither_look_nor_press(
    shown: tuple[Page, SampleRun], headers: dict[str, str]
) -> None:
    page, run = shown
    before = list(run.calls)
    assert ask(page, "GET", "/state", **headers)[0] == 403
    assert press(page, "hold", {"source": "online"}, **headers) == (403, "another site has sent this")
    assert run.calls == before


def test_a_form_of_another_site_cannot_press(shown: tuple[Page, SampleRun]) -> None:
    page, run = shown
    before = list(run.calls)
    body = json.dumps({"source": "online"}).encode()
    assert ask(page, "POST", "/publish/hold", body, Content_Type="application/json")[0] == 403
    assert press(page, "hold", body, Content_Type="text/plain")[0] == 415
    assert run.calls == before


# Buttons


def test_buttons_hold_resume_and_roll_back(shown: tuple[Page, SampleRun]) -> None:
    page, run = shown
    run.calls.clear()
    same = {"Origin": str(page.address).rstrip("/"), "Sec_Fetch_Site": "same-origin"}
    assert press(page, "hold", {"source": "online", "reason": "odd scores"}, **same) == (200, "")
    assert press(page, "hold", {"source": "online"}) == (200, "")
    assert press(page, "rollback", {"source": "online", "version": "46000"}) == (200, "")
    assert press(page, "resume", {"source": "online"}) == (200, "")
    assert run.calls == [
        ("hold", "odd scores"),
        ("hold", "held by hand, on the page"),
        ("rollback", "46000"),
        ("resume", ""),
    ]


def test_a_button_changes_the_split_of_a_server(page: Page) -> None:
    def targets() -> list[str]:
        found = json.loads(ask(page, "GET", "/state")[2])["sources"]
        return [one["targets"] for source in found for one in source.get("splits", ())]

    assert press(page, "split", {"source": "ads", "name": "ads", "targets": "ads/1:50,ads/2:50"}) == (200, "")
    while targets() != ["ads/1:50,ads/2:50"]:
        pass  # the page looks at its sources all the time
    assert press(page, "split", {"source": "ads", "name": "ads", "targets": ""}) == (200, "")
    while targets():
        pass


@pytest.mark.parametrize(
    ("verb", "body", "status", "said"),
    [
        ("split", {"source": "ads", "name": "ads", "targets": "ads/9"}, 400, "there is no ads=ads/9"),
        ("split", {"source": "ads", "name": "", "targets": "ads/2"}, 400, "name"),
        ("split", {"source": "ads", "name": "ads"}, 400, "targets"),
        ("split", {"source": "online", "name": "ads", "targets": ""}, 400, "online is no server"),
        ("split", {"source": "x", "name": "ads", "targets": ""}, 400, "no source"),
        ("rollback", {"source": "online"}, 400, "version"),
        ("rollback", {"source": "online", "version": "9"}, 502, "version 9 is not there any more"),
        ("hold", {"source": "frozen"}, 400, "frozen has no publishing"),
        ("hold", {"source": "x"}, 400, "no source"),
        ("hold", {"source": "online", "more": 1}, 400, "more"),
        ("hold", {"source": "online", "reason": "x" * 501}, 400, "reason"),
        ("hold", b"{", 400, "not JSON"),
        ("hold", b"[" * 10_000, 400, "not JSON"),
        ("hold", b"x" * (MOST_BODY + 1), 413, "more than"),
        ("delete", {"source": "online"}, 404, "nothing here"),
    ],
)
def test_what_cannot_be_done_is_said(page: Page, verb: str, body: Any, status: int, said: str) -> None:
    found, error = press(page, verb, body)
    assert found == status
    assert said in error


# Beyond this machine


def test_beyond_this_machine_a_token_is_needed() -> None:
    with pytest.raises(ConfigError, match="neither certificates nor a token"):
        Page([], "0.0.0.0")
    run, sources = sample_sources()
    with Page(sources, "0.0.0.0", 0, "s3cret") as page:
        assert (
            ask(page, "GET", "/", Host="trainer.example:8686")[0] == 200
        )  # holds nothing; it asks for the token
        for path in ("/state", "/events"):
            status, headers, _ = ask(page, "GET", path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert ask(page, "GET", path, Authorization="Bearer s3cre")[0] == 401
        assert ask(page, "GET", "/state", Authorization="Bearer s3cret")[0] == 200
        assert press(page, "hold", {"source": "online"})[0] == 401
        assert run.calls == []
        assert press(page, "hold", {"source": "online"}, Authorization="Bearer s3cret")[0] == 200


def test_a_taken_port_is_said_and_a_closed_page_frees_its_own() -> None:
    with Page([]) as page:
        port = port_of(page)
        with pytest.raises(ListenError, match=r"ui: cannot listen on 127\.0\.0\.1"):
            Page([], port=port).start()
    page.close()
    with Page([], port=port):
        pass
