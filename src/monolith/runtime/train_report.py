"""The report of a training run as plain data, which JSON can hold."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from monolith.train import Task, TrainConfig, TrainReport


def report_as_json(report: TrainReport, task: Task, config: TrainConfig) -> dict[str, Any]:
    """Return the report of a run, as JSON can hold it.

    Its speed is that of the training steps: the time before the first step, saves and evaluations do not
    count.
    """
    training = report.seconds - report.start_seconds - report.save_seconds - report.evaluate_seconds
    return {
        "task": task.name,
        "model_dir": config.model_dir or None,
        "step": report.step,
        "steps": report.steps,
        "examples": report.examples,
        "skipped_batches": report.skipped,
        "bad_records": dict(report.bad_records),
        "dense_staleness": report.dense_staleness,
        "seconds": round(report.seconds, 3),
        "start_seconds": round(report.start_seconds, 3),
        "save_seconds": round(report.save_seconds, 3),
        "evaluate_seconds": round(report.evaluate_seconds, 3),
        "examples_per_s": round(report.examples / training if training > 0 else 0.0, 1),
        "loss": None if math.isnan(report.loss) else report.loss,
        "stop_reason": report.stop_reason,
        "finished": report.finished,
        "restored_from": report.restored_from,
        "checkpoint": report.checkpoint,
        "save_trouble": report.save_trouble,
        "refused": dict(report.refused),
        "overdue": dict(report.overdue),
        "lost_servers": [asdict(one) for one in report.lost.servers],
        "lost_workers": [asdict(one) for one in report.lost.workers],
        "metrics": {
            name: None if math.isnan(rows[-1].value) else rows[-1].value
            for name, rows in report.windows.items()
            if rows
        },
        "evaluations": report.evaluations,
        "evaluation": None if report.evaluation is None else report.evaluation.to_json(),
        "best": None if report.best is None else asdict(report.best),
    }
