"""The server of models: repository, batching, and the Open Inference Protocol over gRPC and HTTP.

    folder = ServedFolder(folder="exports/ads", name="ads")
    with InferenceServer(ServeConfig(http_port=8000), [folder], catalog) as server:
        print(server.http_url)

A request is decoded by its transport (`grpc_port`, `http_api`), goes by its route (`traffic`) to a
version of a model (`repository`), which is held meanwhile, is answered together with others (`batching`),
and goes back the way it came. `inference` is where these meet.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
