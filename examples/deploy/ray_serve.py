"""A model behind Ray Serve: `python ray_serve.py SERVABLES`, after `pip install 'ray[serve]'`.

Ray Serve chooses the machines, starts and scales replicas and routes requests. Each replica maps the tables
of the newest version, so replicas of one machine share their memory. Rows go in, predictions come out:

    curl -d '[{"user": "ann", "price": 3.5}]' http://127.0.0.1:8000/

Where a machine is busy, Ray Serve may end its HTTP proxy before it has started ("failed the health check 3
times in a row"); the variable RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60 gives it time.
"""

import sys
from pathlib import Path

from ray import serve

from monolith.serve import Predictor


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
class Model:
    def __init__(self, folder: str) -> None:
        self.predictor = Predictor(folder, threads=1, show=False)
        self.predictor.warm_up()

    async def __call__(self, request) -> dict:
        return self.ask(await request.json())

    def ask(self, rows: list[dict]) -> dict:
        given = {name for row in rows for name in row}
        inputs = [one.name for one in self.predictor.signature.inputs if one.name in given]
        answer = self.predictor.predict({name: [row.get(name) for row in rows] for name in inputs})
        return {
            "version": self.predictor.version,
            **{name: values.tolist() for name, values in answer.outputs.items()},
        }

    def check_health(self) -> None:
        self.predictor.warm_up()


def app(folder: str) -> serve.Application:
    return Model.bind(str(Path(folder).resolve()))  # replicas start in another folder


if __name__ == "__main__":
    serve.run(app(sys.argv[1]), blocking=True)
