import socket
import ssl
import urllib.error
import urllib.request

import pytest

from monolith.errors import ConfigError, ListenError
from monolith.observe import Metrics


def rendered_lines(metrics: Metrics) -> list[str]:
    return metrics.render().decode().splitlines()


def test_a_counter_only_grows():
    metrics = Metrics()
    rows = metrics.counter("rows_created", "Rows born.")
    rows.inc()
    rows.inc(2)
    assert "monolith_rows_created_total 3.0" in rendered_lines(metrics)
    with pytest.raises(ConfigError, match="can only increase"):
        rows.inc(-1)


def test_a_gauge_holds_its_last_value_per_label():
    metrics = Metrics()
    size = metrics.gauge("table_rows", "Rows held.", labels=["table"])
    size.set(5, table="item")
    size.set(7, table="user")
    size.set(6, table="item")
    lines = rendered_lines(metrics)
    assert 'monolith_table_rows{table="item"} 6.0' in lines
    assert 'monolith_table_rows{table="user"} 7.0' in lines


def test_a_histogram_counts_into_its_buckets():
    metrics = Metrics()
    latency = metrics.histogram("lookup_seconds", "Time of a lookup.", buckets=(0.1, 1.0))
    latency.observe(0.05)
    latency.observe(0.5)
    latency.observe(9)
    lines = rendered_lines(metrics)
    assert 'monolith_lookup_seconds_bucket{le="0.1"} 1.0' in lines
    assert 'monolith_lookup_seconds_bucket{le="1.0"} 2.0' in lines
    assert 'monolith_lookup_seconds_bucket{le="+Inf"} 3.0' in lines


def test_dots_in_the_prefix_become_underscores():
    metrics = Metrics(prefix="monolith.training.ctr-head")
    metrics.counter("steps", "Steps.").inc()
    assert "monolith_training_ctr_head_steps_total 1.0" in rendered_lines(metrics)


def test_two_registries_do_not_meet():
    first, second = Metrics(), Metrics()
    first.counter("steps", "Steps.").inc()
    assert "monolith_steps_total" not in second.render().decode()


def test_asking_again_gives_the_same_metric():
    metrics = Metrics()
    assert metrics.counter("steps", "Steps.") is metrics.counter("steps", "Steps.")


def test_a_name_keeps_its_kind_labels_and_buckets():
    metrics = Metrics()
    metrics.counter("steps", "Steps.")
    metrics.histogram("t", "Time.", buckets=(1.0,))
    with pytest.raises(ConfigError, match="already exists as a counter"):
        metrics.gauge("steps", "Steps.")
    with pytest.raises(ConfigError, match="already exists"):
        metrics.counter("steps", "Steps.", labels=["table"])
    with pytest.raises(ConfigError, match="already exists"):
        metrics.histogram("t", "Time.", buckets=(2.0,))


def test_missing_and_extra_labels_are_named():
    counter = Metrics().counter("steps", "Steps.", labels=["table"])
    with pytest.raises(ConfigError, match=r"takes the labels \['table'\], got \['shard'\]"):
        counter.inc(shard="1")
    with pytest.raises(ConfigError, match=r"got \[\]"):
        counter.inc()


@pytest.mark.parametrize("name", ["", "a b", "rows/s"])
def test_a_name_prometheus_cannot_take_is_refused(name):
    with pytest.raises(ConfigError, match="is not a valid metric name"):
        Metrics(prefix="" if not name else "monolith").counter(name, "?")


def test_bad_buckets_are_refused():
    with pytest.raises(ConfigError, match="cannot make metric"):
        Metrics().histogram("t", "Time.", buckets=(2.0, 1.0))


def test_serve_answers_until_closed_and_frees_the_port():
    metrics = Metrics()
    metrics.counter("steps", "Steps.").inc()
    with metrics.serve(0) as server:
        assert server.address == "127.0.0.1"
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"monolith_steps_total 1.0" in answer.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)
    server.close()
    metrics.serve(server.port).close()


def test_a_port_in_use_is_named_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"port {port} is in use.*Choose another port") as raised:
            Metrics().serve(port)
    assert isinstance(raised.value.__cause__, OSError)


def test_an_impossible_port_or_address_is_our_error_too():
    with pytest.raises(ListenError, match="0 to 65535"):
        Metrics().serve(70_000)
    with pytest.raises(ListenError, match="Choose an address of this machine"):
        Metrics().serve(0, address="192.0.2.1")


def fetch(url, *, header=None, context=None):
    request = urllib.request.Request(url, headers={} if header is None else {"Authorization": header})
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return answer.read()


def test_only_admitted_callers_are_answered():
    metrics = Metrics()
    metrics.counter("steps", "Steps.").inc()
    with metrics.serve(0, admits=lambda header: header == "Bearer secret") as server:
        for header in (None, "Bearer wrong", "secret"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                fetch(server.url, header=header)
            assert raised.value.code == 401
            assert b"monolith_steps" not in raised.value.read()
        assert b"monolith_steps_total 1.0" in fetch(server.url, header="Bearer secret")


def contexts(certificates, authority):
    """What a server shows and demands, and what a caller of some authority does."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.crt")
    server.load_cert_chain(certificates / "ca-node.crt", certificates / "ca-node.key")
    server.verify_mode = ssl.CERT_REQUIRED
    caller = ssl.create_default_context(cafile=certificates / "ca.crt")
    if authority:
        caller.load_cert_chain(certificates / f"{authority}-node.crt", certificates / f"{authority}-node.key")
    return server, caller


def test_with_certificates_both_ends_show_one(certificates):
    metrics = Metrics()
    server_context, caller = contexts(certificates, "ca")
    with metrics.serve(0, context=server_context) as server:
        assert server.url == f"https://127.0.0.1:{server.port}/metrics"
        assert fetch(server.url, context=caller) is not None
        for stranger in ("other", ""):
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                fetch(server.url, context=contexts(certificates, stranger)[1])
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            fetch(server.url.replace("https", "http"))


def test_a_caller_that_never_shakes_hands_delays_no_other(certificates):
    server_context, caller = contexts(certificates, "ca")
    with (
        Metrics().serve(0, context=server_context) as server,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        assert fetch(server.url, context=caller) is not None


def test_metrics_can_be_served_on_ipv6():
    try:
        server = Metrics().serve(0, "::1")
    except ListenError:
        pytest.skip("this machine has no ::1")
    with server:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert fetch(server.url) is not None


def test_other_pages_are_served_next_to_the_metrics_and_guarded_like_them():
    metrics = Metrics()
    metrics.counter("steps", "Steps.").inc()
    with metrics.serve(
        0, admits=lambda given: given == "Bearer t", pages={"/status": lambda: b"{}"}
    ) as served:
        url = served.url.replace("/metrics", "/status")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=10)
        for path, found in ((url, b"{}"), (served.url, b"monolith_steps_total 1.0")):
            request = urllib.request.Request(path, headers={"Authorization": "Bearer t"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert found in answer.read()


def test_a_series_is_added_to_without_naming_its_labels_again():
    metrics = Metrics()
    add = metrics.counter("asked", "Questions", ["by"]).series(by="ann")
    seen = metrics.histogram("seconds", "Time", buckets=[1.0]).series()
    for _ in range(2):
        add(1.0)
        seen(0.5)
    text = metrics.render().decode()
    assert 'monolith_asked_total{by="ann"} 2.0' in text
    assert 'monolith_seconds_bucket{le="1.0"} 2.0' in text
    with pytest.raises(ConfigError, match="takes the labels"):
        metrics.counter("asked", "Questions", ["by"]).series()
