"""The example for Ray Serve answers what the predictor says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from serve.served_tasks import columns, exported, trained

from monolith.serve import Predictor

EXAMPLES = Path(__file__).parents[2] / "examples" / "deploy"


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.soak
def test_the_example_answers_what_the_predictor_says(tmp_path, monkeypatch):
    serve = pytest.importorskip("ray.serve")
    from ray import cloudpickle

    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import ray_serve as example

    cloudpickle.register_pickle_by_value(example)  # other processes do not find it, as they would __main__
    folder = exported(trained(tmp_path / "run"), tmp_path / "out").folder
    given = {name: values for name, values in columns(3, seed=5).items() if name not in ("click", "time")}
    rows = [{name: values[number] for name, values in given.items()} for number in range(3)]
    try:
        serve.start(proxy_location="Disabled")  # what HTTP would be handed is asked directly
        said = serve.run(example.app(folder), name="model").ask.remote(rows).result(timeout_s=120)
    finally:
        serve.shutdown()
    with Predictor(folder, show=False) as predictor:
        assert said["click"] == predictor.predict(given).outputs["click"].tolist()
        assert said["version"] == predictor.version
