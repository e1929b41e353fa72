"""The inference server: models from folders over the Open Inference Protocol, HTTP and gRPC.

    folder = ServedFolder(folder="exports/ads", name="ads")
    with InferenceServer(ServeConfig(http_port=8000), [folder], catalog) as server:
        print(server.http_url)

A transport decodes a request (`grpc_port`, `http_api`). `inference` routes it to a version of a model, leases
that version (`repository`) and has it answered in a batch (`batching`); the transport encodes the answer.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
