"""Metrics of training: what is measured, over which window, and the AUC natively."""

from monolith.train.metrics.auc import GroupedAuc, StreamingAuc
from monolith.train.metrics.metric_set import METRICS, Metric, MetricSet, Windowed, WindowRow, make_metric
from monolith.train.metrics.ranking import RankingMetric, ranking_scores

__all__ = [
    "METRICS",
    "GroupedAuc",
    "Metric",
    "MetricSet",
    "RankingMetric",
    "StreamingAuc",
    "WindowRow",
    "Windowed",
    "make_metric",
    "ranking_scores",
]
