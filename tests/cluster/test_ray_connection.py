import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from services.ray import RayCluster, need_ray
from services.servers import free_port

from monolith.cluster import ray_discovery
from monolith.cluster.ray_discovery import LOCAL, connected, import_ray
from monolith.errors import AddressError, MissingExtraError, UnavailableError


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"^counting sheep needs .*monolith-recsys\[ray\]"):
        import_ray("counting sheep")


def test_a_process_that_is_connected_stays_so(ray_cluster: RayCluster):
    handler = signal.getsignal(signal.SIGTERM)
    with connected("testing", "127.0.0.1:1") as ray:
        assert ray.is_initialized()
    assert ray.is_initialized()
    assert ray.get_runtime_context().gcs_address.endswith(f":{ray_cluster.port}")
    assert signal.getsignal(signal.SIGTERM) is handler


STRANGER = """
import signal, sys
from monolith.cluster.ray_discovery import connected

mine = lambda *_: None
signal.signal(signal.SIGTERM, mine)
with connected("testing", sys.argv[1]) as ray:
    assert ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is mine
assert not ray.is_initialized()
assert signal.getsignal(signal.SIGTERM) is mine
print("well")
"""


def test_a_process_that_was_not_is_connected_for_a_while_and_keeps_its_signal_handler(
    ray_cluster: RayCluster,
):
    said = subprocess.run(
        [sys.executable, "-c", STRANGER, ray_cluster.address], capture_output=True, text=True, check=False
    )
    assert said.stdout == "well\n", said.stderr


@pytest.fixture
def unconnected(monkeypatch):
    """Ray, in a process that might be connected to it, but does not know."""
    need_ray()
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_discovery, "_LISTENING_WITHIN", timedelta(seconds=0.1))
    return ray


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_without_a_server_is_refused_soon(scheme):
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match=f"connect to Ray at '{address}': nothing listens"):
        connected("testing", address).__enter__()


@pytest.mark.usefixtures("unconnected")
def test_what_is_no_address_is_refused():
    with pytest.raises(AddressError, match="somewhere"):
        connected("testing", "somewhere").__enter__()


def test_what_ray_says_when_it_cannot_connect_is_passed_on(unconnected, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("no cluster here.")

    monkeypatch.setattr(unconnected, "init", refuse)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UnavailableError, match="'local': no cluster here"):
        connected("testing", LOCAL).__enter__()
    assert signal.getsignal(signal.SIGTERM) is handler
