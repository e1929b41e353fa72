"""The loop that reads HTTP, in a process of its own: its limit of files is lowered."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import textwrap

SERVER = """
    import resource, signal, socket
    from monolith.serve.config import ServeLimits
    from monolith.serve.server.http_loop import HttpLoop

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"alive"})

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    listener = socket.create_server(("127.0.0.1", 0))
    loop = HttpLoop(app, [listener], limits=ServeLimits(), probes=["/live"])
    print(listener.getsockname()[1], flush=True)
    signal.pause()
"""


def test_probes_are_answered_though_idle_connections_are_more_than_the_files_of_the_process():
    server = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER)], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(server.stdout.readline())
        with contextlib.ExitStack() as idle:
            for _ in range(300):
                with contextlib.suppress(ConnectionError):  # it may hang up at once
                    idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            probe = http.client.HTTPConnection("127.0.0.1", port, timeout=5)  # the idle ones have 10 s
            probe.request("GET", "/live")
            assert probe.getresponse().read() == b"alive"
            probe.close()
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.stdout.close()
