"""What a training came to, as plain data: printed for a person, or as JSON.

A process that was launched by another hands it over marked, in a line of its output, and prints nothing.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monolith.cli.options.train import TrainOptions
from monolith.observe.progress import describe_rate, describe_seconds
from monolith.runtime.launch import MARK
from monolith.runtime.losses import describe_uncounted
from monolith.train.evaluate_config import LOSS, headlines
from monolith.train.hook import DATA_ENDED

if TYPE_CHECKING:
    pass


def write_report(report: Mapping[str, Any], options: TrainOptions, environ: Mapping[str, str]) -> None:
    """Hand a report to the launcher, if there is one; or print it, as JSON if so asked."""
    if environ.get(MARK):
        sys.stdout.write(f"{environ[MARK]} {json.dumps(report)}\n")
        sys.stdout.flush()
        return
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        print_report(report, options)
    if trouble := report.get("save_trouble"):
        sys.stdout.flush()
        sys.stderr.write(f"monolith: the run ended, and {trouble}\n")


def print_report(report: Mapping[str, Any], options: TrainOptions) -> None:
    """Print what a run did for a person."""
    from rich.console import Console
    from rich.markup import escape

    facts = {
        "ended": report["stop_reason"],
        "steps": f"{report['steps']:,} in {describe_seconds(report['seconds'])}, {report['step']:,} in all",
        "time": _describe_times(report),
        "examples": f"{report['examples']:,}, {describe_rate(report['examples_per_s'], 'examples')}",
        **({} if report["loss"] is None else {"loss": f"{report['loss']:.4f}, {_LAST_STEPS}"}),
        **{
            name.replace("/", " "): f"{report['metrics'][name]:.4f}"
            for name in headlines(report["metrics"])
            if report["metrics"][name] is not None
        },
    }
    if report.get("evaluation") is not None:
        metrics = report["evaluation"]["metrics"]
        facts |= {
            f"eval {name.replace('/', ' ')}": f"{metrics[name]:.4f}"
            for name in [*headlines(metrics), LOSS]
            if metrics.get(name) is not None
        }
    if best := report.get("best"):
        facts["best"] = f"{best['metric'].replace('/', ' ')} {best['value']:.4f} at step {best['step']:,}"
    for name, words in (("refused", "ids found no room"), ("overdue", "expired rows were kept")):
        if report.get(name):
            facts[name] = ", ".join(f"{table}: {count:,} {words}" for table, count in report[name].items())
    if bad := report.get("bad_records"):
        facts["bad records"] = "; ".join(f"{count:,} left out: {why}" for why, count in bad.items())
    if report["skipped_batches"]:
        facts["skipped"] = f"{report['skipped_batches']:,} batches with a loss or gradient of NaN or infinity"
    for kind in ("server", "worker"):
        if found := report.get(f"lost_{kind}s"):
            facts[f"lost {kind}s"] = "; ".join(_describe_lost(kind, one) for one in found)
    if report["restored_from"] is not None:
        facts["went on from"] = report["restored_from"]
    if not report["model_dir"]:
        facts["kept"] = "nothing; give --model-dir to keep the model"
    elif report["checkpoint"] is not None:
        facts["checkpoint"] = report["checkpoint"]
        facts["evaluate with"] = evaluate_command(options, report["model_dir"])
    if (why := finished_before(report)) is not None:
        facts["finished"] = why
    console = Console(highlight=False)
    console.print(f"[bold]{escape(report['task'])}[/]")
    width = max(14, *(len(name) + 1 for name in facts))
    for name, value in facts.items():
        console.print(f"  [cyan]{escape(name):<{width}}[/]{escape(value)}", soft_wrap=True)


def finished_before(report: Mapping[str, Any]) -> str | None:
    """Return what to say of a run that had nothing more to do when it was started again; None of others."""
    if report["steps"] or report["restored_from"] is None or not report.get("finished"):
        return None
    if report["stop_reason"] == DATA_ENDED:
        why = "all of its data was trained on before, and there is none new"
        more = "give it more data, or --epochs with a larger number if it was trained with --epochs"
    else:
        why = f"it had come to its limit before ({report['stop_reason']})"
        more = "raise the limit"
    return (
        f"this run was finished, and nothing was trained: {why}. To train on, {more}; to train anew, give "
        "another --model-dir; to use what it learned, see `monolith evaluate`, `predict` and `export`"
    )


_LAST_STEPS = "the mean of the last steps"


def _describe_times(report: Mapping[str, Any]) -> str:
    """Return what the time of a run went to; what took none is left out."""
    apart = {"start": "start_seconds", "saving": "save_seconds", "evaluating": "evaluate_seconds"}
    spent = {name: float(report[key]) for name, key in apart.items()}
    spent = {"training": max(report["seconds"] - sum(spent.values()), 0.0), **spent}
    return ", ".join(
        f"{name} {f'{seconds:.1f}s' if seconds < 10 else describe_seconds(seconds)}"
        for name, seconds in spent.items()
        if seconds >= 0.05 or name == "training"
    )


def _describe_lost(kind: str, one: Mapping[str, Any]) -> str:
    seconds = f"{kind} {one[kind]} for {one['seconds']:.1f} s"
    if kind == "worker":
        return f"{seconds}, {one['records']:,} records trained again"
    rows = "unknown" if one["rows"] is None else f"{one['rows']:,}"
    if one.get("standby"):
        seconds += ", until its standby took over"
    more = describe_uncounted(one.get("uncounted", ()), one.get("uncounted_why", ""))
    return f"{seconds}, {rows} rows and {one['updates']:,} updates gone{more}"


def evaluate_command(options: TrainOptions, model_dir: str) -> str:
    """Return the command that measures what was trained."""
    words: Sequence[str] = ["monolith", "evaluate", *([] if options.task is None else [options.task])]
    words = [*words, "--model-dir", model_dir]
    if options.config is not None:
        words = [*words, "--config", str(options.config)]
    for text in options.set:
        words = [*words, "--set", text]
    return shlex.join(words)
