"""Writes the part of `docs/reference/` that docstrings know: a section for each public name of `monolith`.

    python tools/reference.py            write the pages anew
    python tools/reference.py --check    exit with 1 if a page is not what it would write

A page covers one area (`AREAS`). Its beginning is written by hand and has an example, which
`tests/docs/test_reference.py` runs. After the line `MARK` follow the sections: signature and summary of each
name, from its docstring, and the package that defines it.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MARK = "<!-- Written by tools/reference.py from docstrings; edit those. -->"

AREAS = {
    "tables": """
        Table TableConfig Segment DictTable NativeTable CudaTable AdmissionConfig Adagrad Adam Ftrl
        Sgd Momentum Rmsprop Constant Zeros RandomUniform ConstantRate PolynomialDecay Fp16 Fp32
        RaggedTensor
    """,
    "features": """
        Batch FeatureSpec IdFeature FloatFeature BucketFeature CrossFeature SequenceFeature Label
        Sum Mean Max FirstN
    """,
    "models": """
        Feature FeatureSet EmbeddingCollection EmbeddingOptimizer ReadyModel DeepFM DCNv2 DLRM
        DeepInterest MMoE FFM TwoTower MLP Dense auc sigmoid_loss_and_pred
        Store LocalStore ParameterServerStore AllToAllStore
    """,
    "data": """
        Source Records DataConfig DataSplit FileSource MemorySource ArrowSource PandasSource
        PolarsSource IterableSource KafkaSource KafkaConfig Pipeline Shard ShuffleConfig ClickLog
        ClickLogConfig DriftingStream DriftConfig make_batch
    """,
    "training": """
        Task RetrievalTask Mode Trainer TrainConfig TrainReport Hook Metric MetricSet METRICS
        EvaluateConfig KeepConfig SaveConfig RestoreConfig ExpiryConfig ScheduleConfig load_task
    """,
    "runs": """
        Run RunConfig load_run_config ClusterConfig DiscoveryConfig FailoverConfig JobConfig Discovery
        FilesDiscovery ZooKeeperDiscovery ConsulDiscovery
    """,
    "checkpoints": """
        Checkpointer Saver TablesPart DensePart RestoreOptions list_checkpoints find_checkpoint
        read_contents
    """,
    "serving": """
        Predictor Prediction Publisher Subscriber PublishConfig GuardConfig
    """,
    "errors": """
        MonolithError ConfigError MissingExtraError DataError TrainingError TableError SaveError
        RestoreError ExportError RequestError RetryableError
    """,
}
"""Page -> the names it documents. Together they are all of `monolith.__all__`."""


def section(name: str) -> str:
    """Return the section of one name: its signature, its summary, and where its docstring is."""
    import monolith

    value = getattr(monolith, name)
    home = getattr(value, "__module__", None)
    room = ".".join(home.split(".")[:2]) if home else "monolith.train"
    lines = [f"### {name}", "", f"{summary_of(name, value)} Defined in `{room}`."]
    if (signature := signature_of(name, value)) is not None:
        lines += ["", "```python", signature, "```"]
    return "\n".join(lines)


def summary_of(name: str, value: object) -> str:
    """Return the first paragraph of a docstring, as one line."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        keys = value if isinstance(value, dict) else ()
        return f"The choices by name: {', '.join(f'`{key}`' for key in keys)}."
    return " ".join((inspect.getdoc(value) or name).split("\n\n")[0].split())


def signature_of(name: str, value: object) -> str | None:
    """Return how a name is called, with types; None for what is no function and takes no arguments."""
    if not callable(value):
        return None
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    words = [re.sub(r"0x[0-9a-f]+", "...", str(one)) for one in parameters]
    words = [re.sub(r"<factory>|<[^>]*>", "...", word) for word in words]
    words = [re.sub(r""": (['"])(.*?)\1(?=$| =)""", r": \2", word) for word in words]  # types as text
    if not words or words == ["*args", "**kwargs"]:
        return None
    keywords = [one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters]
    if any(keywords) and not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        words.insert(keywords.index(True), "*")
    line = f"{name}({', '.join(words)})"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + ")"


def page(area: str) -> str:
    """Return the whole page of an area: its beginning as it is, and all sections."""
    path = FOLDER / f"{area}.md"
    begin = path.read_text(encoding="utf-8").partition(MARK)[0]
    return begin + MARK + "\n\n" + "\n\n".join(map(section, AREAS[area].split())) + "\n"


def main(arguments: list[str]) -> int:
    stale = []
    for area in AREAS:
        text, path = page(area), FOLDER / f"{area}.md"
        if text != path.read_text(encoding="utf-8"):
            stale.append(area)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in arguments:
        sys.stdout.write(f"stale in docs/reference: {', '.join(stale)}; run python tools/reference.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
