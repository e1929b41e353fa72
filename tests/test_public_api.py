"""The public API: the names of `monolith`, frozen here so that a change to them is seen in review."""

from __future__ import annotations

import monolith

NAMES = """
Table TableConfig Segment DictTable NativeTable CudaTable AdmissionConfig Adagrad Adam Ftrl Sgd Momentum
Rmsprop Constant Zeros RandomUniform ConstantRate PolynomialDecay Fp16 Fp32 RaggedTensor
Batch FeatureSpec IdFeature FloatFeature BucketFeature CrossFeature SequenceFeature HistoryFeature
Label Sum Mean Max FirstN Each
Feature FeatureSet EmbeddingCollection EmbeddingOptimizer ReadyModel DeepFM DCNv2 DLRM DeepInterest MMoE
FFM TwoTower SASRec HSTU MLP Dense auc sigmoid_loss_and_pred Store LocalStore ParameterServerStore
AllToAllStore
Source Records DataConfig DataSplit FileSource MemorySource ArrowSource PandasSource PolarsSource
IterableSource KafkaSource KafkaConfig Pipeline HistoryConfig Shard ShuffleConfig ClickLog ClickLogConfig
DriftingStream DriftConfig make_batch
Task RetrievalTask Mode Trainer TrainConfig TrainReport Hook Metric MetricSet METRICS EvaluateConfig
KeepConfig SaveConfig RestoreConfig ExpiryConfig ScheduleConfig load_task
Run RunConfig load_run_config ClusterConfig DiscoveryConfig FailoverConfig JobConfig Discovery FilesDiscovery
ZooKeeperDiscovery ConsulDiscovery
Checkpointer Saver TablesPart DensePart RestoreOptions list_checkpoints find_checkpoint read_contents
Predictor Prediction Client AsyncClient ClientOptions ClientAnswer
Publisher Subscriber PublishConfig GuardConfig
MonolithError ConfigError MissingExtraError DataError TrainingError TableError SaveError RestoreError
ExportError RequestError RetryableError StaleAnswerError
"""


def test_the_public_names_are_these() -> None:
    assert sorted(monolith.__all__) == sorted(NAMES.split())


def test_every_public_name_is_there() -> None:
    for name in monolith.__all__:
        assert getattr(monolith, name) is not None
        assert name in dir(monolith)
