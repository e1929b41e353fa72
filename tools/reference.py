"""Writes `docs/reference/` from docstrings: an index page for each area, and a page for each public name.

    python tools/reference.py            write the index pages anew
    python tools/reference.py --check    exit with 1 if an index page is out of date

An index page covers one area (`AREAS`). Its introduction is written by hand and has an example. After the
line `MARK` follows a table of the area's names with the first sentence of their docstrings. Index pages are
committed.

The page of a name is not committed: `page` returns a few lines that tell mkdocstrings what to render, and
`tools/docs_site.py` adds them to the site when `make docs` builds it. It shows the signature, the docstring
with its arguments, errors and example, the members, and the module that defines the name.

Every docstring of a public name ends with a section `Examples:` in doctest form, and so do those of the core
classes of `docs/structures.md`. `tests/docs/test_reference.py` runs all of them, each in an empty folder, and
fails if a public name has none.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MARK = "<!-- Written by tools/reference.py from docstrings; edit those. -->"

AREAS = {
    "tables": """
        Table TableConfig Segment DictTable NativeTable CudaTable AdmissionConfig Adagrad Adam Ftrl
        Sgd Momentum Rmsprop Constant Zeros RandomUniform ConstantRate PolynomialDecay Fp16 Fp32
        RaggedTensor
    """,
    "features": """
        Batch FeatureSpec IdFeature FloatFeature BucketFeature CrossFeature SequenceFeature HistoryFeature
        Label Sum Mean Max FirstN Each
    """,
    "models": """
        Feature FeatureSet EmbeddingCollection EmbeddingOptimizer ReadyModel DeepFM DCNv2 DLRM
        DeepInterest MMoE FFM TwoTower SASRec HSTU MLP Dense auc sigmoid_loss_and_pred
        Store LocalStore ParameterServerStore AllToAllStore
    """,
    "data": """
        Source Records DataConfig DataSplit FileSource MemorySource ArrowSource PandasSource
        PolarsSource IterableSource KafkaSource KafkaConfig Pipeline HistoryConfig Shard
        ShuffleConfig ClickLog ClickLogConfig DriftingStream DriftConfig make_batch
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
        Predictor Prediction Client AsyncClient ClientOptions ClientAnswer Publisher Subscriber
        PublishConfig GuardConfig
    """,
    "errors": """
        MonolithError ConfigError MissingExtraError DataError TrainingError TableError SaveError
        RestoreError ExportError RequestError RetryableError StaleAnswerError
    """,
}
"""Area -> the names it documents. Together they are all of `monolith.__all__`."""


# The names


def names_by_area() -> dict[str, list[str]]:
    return {area: names.split() for area, names in AREAS.items()}


@cache
def definition(name: str) -> tuple[str, ast.stmt, ast.stmt | None]:
    """Return the module that defines a public name, its definition, and the statement after that."""
    module = defined_in("monolith", name)
    assert module is not None, f"monolith.{name} is not defined in Python"
    body = parsed(module_path(module)).body
    at = next(number for number, node in enumerate(body) if name in defines(node))
    return module, body[at], body[at + 1] if at + 1 < len(body) else None


def docstring(name: str) -> str:
    """Return the docstring of a public name; of a constant, the string below its definition."""
    _, node, following = definition(name)
    return docstring_of(node, following)


def docstring_of(node: ast.stmt, following: ast.stmt | None) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) or ""
    match following:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text)
    return ""


def summary(name: str) -> str:
    """Return the first sentence of a docstring, as one line."""
    first = " ".join(docstring(name).split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", first, maxsplit=1)[0]


def page(name: str) -> str:
    """Return the page of a public name, for mkdocstrings."""
    module, _, _ = definition(name)
    area = next(area for area, names in names_by_area().items() if name in names)
    return (
        f"[{area.capitalize()}](../{area}.md): `from monolith import {name}`, defined in `{module}`.\n\n"
        f"::: {module}.{name}\n    options:\n      heading_level: 1\n"
    )


def examples() -> dict[str, str]:
    """Return the docstrings with examples, of classes, functions and constants of the library, by name."""
    found = {}
    for path in sorted((ROOT / "src" / "monolith").rglob("*.py")):
        if "    >>> " not in path.read_text(encoding="utf-8"):
            continue
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        body = parsed(path).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            text = docstring_of(node, following)
            if "\nExamples:\n" in text:
                found |= {f"{module}.{name}": text for name in defines(node)}
    return found


# The index pages


def index_page(area: str) -> str:
    """Return the whole index page of an area: its introduction as it is, and a table of its names.

    A name links to the module that defines it. Its page exists only on the site, which changes the link.
    """
    rows = []
    for name in names_by_area()[area]:
        module, _, _ = definition(name)
        source = "../../" + module_path(module).relative_to(ROOT).as_posix()
        rows.append(f"| [{name}]({source}) | {summary(name).replace('|', chr(92) + '|')} |")
    introduction = (FOLDER / f"{area}.md").read_text(encoding="utf-8").partition(MARK)[0]
    return introduction + "\n".join([MARK, "", "| name | |", "|---|---|", *rows]) + "\n"


# Python source


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_path(module: str) -> Path:
    """Return the file of a module of ours; of a package its stub, if it has one, as that lists its names."""
    place = ROOT.joinpath("src", *module.split("."))
    if not place.is_dir():
        return place.with_suffix(".py")
    stub = place / "__init__.pyi"
    return stub if stub.exists() else place / "__init__.py"


def defines(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines, other than by an import."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def defined_in(module: str, name: str) -> str | None:
    """Follow imports to the module that defines a class, function or constant; None if none of ours does."""
    path = module_path(module)
    if not path.exists():
        return None  # of the compiled core
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return defined_in(node.module, name)
        if name in defines(node):
            return module
    return None


def main(arguments: list[str]) -> int:
    stale = []
    for area in AREAS:
        text, path = index_page(area), FOLDER / f"{area}.md"
        if text != path.read_text(encoding="utf-8"):
            stale.append(area)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in arguments:
        sys.stdout.write(
            f"out of date in docs/reference: {', '.join(stale)}; run python tools/reference.py\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
