"""`docs/seed-map.md` names every name of every module once, places that are there, and who uses them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODULES = {
    "monolith/native_training/clip_ops_test.py": "ClipOpsTest NormOpsTest",
    "monolith/native_training/cluster_manager.py": (
        "generate_session_config get_training_cluster _query_ps_cluster _query_chief_addr "
        "_save_ps_cluster_to_file _fetch_ps_cluster_from_file"
    ),
    "monolith/native_training/cluster_manager_test.py": "ClusterManagerTest.testBasic",
    "monolith/native_training/consul.py": "Client UnixHTTPConnection ConsulException",
    "monolith/native_training/consul_test.py": "ConsulTest",
    "monolith/native_training/cpu_sync_training_test.py": (
        "FeatureTask EmbeddingUpdateTask FloatFeatureTask SequenceFeatureTask NonFeatureTask "
        "CpuSyncTrainTest DistributedSyncTrainTest"
    ),
    "monolith/native_training/cpu_training.py": "",
    "monolith/native_training/cpu_training_distributed_test_binary.py": (
        "SyncHook FeatureTask HostServiceDiscovery test0/1/2 test_run"
    ),
    "monolith/native_training/mlp_utils.py": (
        "check_port MLPEnv add_mpi_exception_hook mlp_pass begin after_create_session EXTRA_DSWORKERS"
    ),
    "monolith/native_training/model.py": (
        "_parse_example TestFFMModel FFMParams _NUM_SLOTS _FFM_SLOT _VOCAB_SIZES _NUM_EXAMPLES"
    ),
    "monolith/native_training/nested_tensors.py": "_iterate NestedTensors",
    "monolith/native_training/nested_tensors_test.py": "NestedTensorTest",
    "monolith/native_training/net_utils.py": (
        "NodeAliveChecker is_ipv6_address concat_ip_and_port get_local_ip is_ipv4_supported "
        "get_local_server_addr AddressFamily"
    ),
    "monolith/native_training/net_utils_test.py": "NetUtilsTest",
    "monolith/native_training/optimizers/adamom.py": "AdamomOptimizer",
    "monolith/native_training/optimizers/adamom_test.py": "AdamomTest",
    "monolith/native_training/optimizers/rmsprop.py": "RmspropOptimizer",
    "monolith/native_training/optimizers/rmsprop_test.py": "RmspropTest build_graph",
    "monolith/native_training/optimizers/rmspropv2_test.py": "RmspropTest build_graph",
    "monolith/native_training/optimizers/shampoo.py": (
        "eigen_inverse_root apply_sparse_precond ShampooOptimizer"
    ),
    "monolith/native_training/prefetch_queue.py": (
        "_GPUCompatiblePaddingFIFOQueue _FIFOQueue _MultiFIFOQueue MultiQueueRunner EnqueueHook "
        "enqueue_dicts_with_queue_return AsyncPushHook AsyncFunctionMgr"
    ),
    "monolith/native_training/prefetch_queue_test.py": (
        "GPUCompatiblePaddingFIFOQueueTests FIFOQueueTest PrefetchTest AsyncManagerTest"
    ),
    "monolith/native_training/ps_benchmark.py": (
        "BenchmarkConfig _BenchmarkWorkerHook _DummyCheckpointSaverHook PsBenchMarkTask"
    ),
    "monolith/native_training/ps_benchmark_test.py": "PsBenchmarkTest",
    "monolith/native_training/ragged_utils.py": "fused_value_rowids",
    "monolith/native_training/ragged_utils_test.py": "RaggedUtilsTestCase",
    "monolith/native_training/remote_predict_ops.py": "",
    "monolith/native_training/restore_test.py": "_generate_config _get_id_tensor PartialRestoreTest",
    "monolith/native_training/runner_utils.py": (
        "isabs gen_get_checkpoint_state ContainerType RunnerConfig get_discovery monolith_discovery"
    ),
    "monolith/native_training/runner_utils_test.py": "RunnerUtilsTest",
    "monolith/native_training/runtime/ops/gen_monolith_ops.py": "gen_monolith_ops_base tf.load_library(...)",
    "monolith/native_training/save_utils.py": (
        "get_latest_checkpoint_state get_monolith_checkpoint_state SaveHelper "
        "SecondOrStepTimerWithTideSetting NoFirstSaveCheckpointSaverHook PsMonitor SaverBuilder "
        "PartialRecoverySaver"
    ),
    "monolith/native_training/save_utils_test.py": (
        "SaveUtilsTest SaverHookTest SaverTest SaveRestoreShardedTest MaxToKeepTest "
        "RecoverLastCheckpointsTest KeepCheckpointEveryNHoursTest SaveRestoreWithVariableNameMap "
        "SecondOrStepTimerWithTideSettingTest"
    ),
    "monolith/native_training/service_discovery.py": (
        "ServiceDiscoveryType ServiceDiscovery ConsulServiceDiscovery TfConfigServiceDiscovery "
        "ZKServiceDiscovery MLPServiceDiscovery deregister_all"
    ),
    "monolith/native_training/service_discovery_test.py": (
        "FakeConsul FakeKazooClient ConsultServiceDiscovery TfConfigServiceDiscoveryTest "
        "ZKServiceDiscoveryTest UtilsTest"
    ),
    "monolith/native_training/serving_ps_test.py": "FeatMeta TableMeta ServingPSTest",
    "monolith/native_training/session_run_hooks.py": (
        "before tide_available_now CustomGlobalStepWaiterHook StopOutsideHoursHook"
    ),
    "monolith/native_training/session_run_hooks_test.py": "GlobalStepWaiterHookTest TideStoppingHookTest",
    "monolith/native_training/signal_utils.py": "print_stack_trace add_siguser1_handler",
    "monolith/native_training/signal_utils_test.py": "SignalUtilsTest",
    "monolith/native_training/static_reshape_op.py": "static_reshape StaticReshapeNBuilder",
    "monolith/native_training/static_reshape_op_test.py": "StaticReshapeOpTest",
    "monolith/native_training/summary/summary_ops.py": "nas_data feature_insight_data",
    "monolith/native_training/summary/summary_ops_test.py": "SummaryTest",
    "monolith/native_training/summary/utils.py": (
        "SummaryType create_summary_metadata prepare_head get_nas_weight_json"
    ),
    "monolith/native_training/summary/utils_test.py": "UtilsTest",
    "monolith/native_training/sync_hooks.py": "SyncHelper ChiefSyncHook WorkerSyncHook TrainingHooksHelper",
    "monolith/native_training/sync_hooks_test.py": "SyncHooksTest CountHook",
    "monolith/native_training/sync_training_hooks.py": (
        "SyncTrainingBarrierSaverListener ParameterSyncHook SyncTrainingForceDumpHook "
        "SyncTrainingSaverControlHook SyncTrainingInfoHook ReqTimeControlDumpHook EofAwareTask"
    ),
    "monolith/native_training/sync_training_hooks_test.py": "EofAwareTaskTest",
    "monolith/native_training/tensor_utils.py": (
        "maybe_squeeze_3d_tensor pack_tensors unpack_tensors pack_typed_keyed_tensors "
        "unpack_packed_tensors split_tensors_with_type merge_dicts"
    ),
    "monolith/native_training/tensor_utils_test.py": "TensorUtilsTest",
    "monolith/native_training/test_utils.py": (
        "generate_test_hash_table_config create_test_ps_cluster profile_it"
    ),
    "monolith/native_training/touched_key_set_ops.py": (
        "TOUCHED_KEY_SET_CAPACITY TOUCHED_KEY_SET_CONCURRENCY_LEVEL create_touched_key_set TouchedKeySet"
    ),
    "monolith/native_training/touched_key_set_ops_test.py": (
        "TouchedKeySetOpsTest test_touched_key_set_basic test_touched_key_set_overflow"
    ),
    "monolith/native_training/utils.py": (
        "PS_JOB_NAME ps_device propagate_back_gradients propagate_back_dict_gradients get_ndim int_shape "
        "extend_as_list check_list to_snake_case to_list _get_parameters _get_all_parameters "
        "_inverted_index params check_ops_dependence with_params get_local_host get_test_tmp_dir "
        "get_debugging_info_file_name get_meta_graph_file_name add_to_collections get_collection "
        "set_metric_prefix get_metric_prefix"
    ),
    "monolith/native_training/utils_test.py": (
        "UtilsTest test_propagate_back_dict_gradients test_check_ops_dependence test_collections"
    ),
    "monolith/native_training/variables.py": (
        "_CACHED_VARIABLES CachedVariableAssociates CachedVariableMeta cached_value "
        "cached_variable_creator fetch_all_cached_variables assign_all_cached_variables "
        "FetchAllCachedVariablesHook"
    ),
    "monolith/native_training/variables_test.py": "CachedVariableTest.testBasic .testHook .testGradient",
    "monolith/native_training/yarn_runtime.py": (
        "get_local_host _get_primus_am_host _get_channel maybe_kill_application maybe_finish_application "
        "create_primus_save_point"
    ),
    "monolith/native_training/yarn_runtime_test.py": (
        "YarnRuntimeTest test_get_local_host_* test_kill test_finish test_save_primus"
    ),
    "monolith/native_training/zk_utils.py": (
        "_PORT _HOSTS _HOSTS_IPV6 is_ipv6_only default_zk_servers MonolithKazooClient clear_zk_path"
    ),
    "monolith/path_utils.py": "find_main get_libops_path",
    "monolith/tpu_runner.py": "TPURunner create_tpu_estimator create_tpu_estimator_on_cpu run main",
    "monolith/utils.py": "enable_monkey_patch CopyFile CopyRecursively",
    "monolith/utils_test.py": "UtilsTest",
}
"""Module of the original -> the names described in it."""

USED, UNUSED = "*used by a run*", "*library only*"
FATES = ("lives in ", f"{USED}, lives in ", f"{UNUSED}, lives in ", "not yet", "no place: ")
SECTIONS = ("The embedding table", "Dense mathematics", "Data")


def read_rows(heading: str) -> list[tuple[str, str]]:
    """Return the two cells of each row of the table below a heading."""
    text = (ROOT / "docs" / "seed-map.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(left, right) for left, right in rows[1:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


ROWS = [(quoted(left)[0], right) for left, right in read_rows("Modules")]
PLACES = sorted(
    {
        name
        for _, right in [*ROWS, *(row for section in SECTIONS for row in read_rows(section))]
        for name in quoted(right)
        if name.startswith(("monolith.", "monolith_compat.", "monolith_bench.", "tests/", "native/"))
    }
)


def parts(right: str) -> list[tuple[list[str], str]]:
    """Split a row into its parts: the names before the first colon, and the fate after it."""
    split = [part.split(": ", 1) for part in right.split("<br>")]
    return [(quoted(names), fate) for names, fate in split]


def test_each_module_has_one_row() -> None:
    assert len(MODULES) == 66
    assert [module for module, _ in ROWS] == list(MODULES)


@pytest.mark.parametrize("module, right", ROWS)
def test_each_name_of_a_module_has_one_fate(module: str, right: str) -> None:
    names = [name for group, _ in parts(right) for name in group]
    assert sorted(names) == sorted(MODULES[module].split())
    for _, fate in parts(right):
        assert fate.startswith(FATES)


@pytest.mark.parametrize("module, right", ROWS)
def test_what_lives_somewhere_is_shown_by_a_test(module: str, right: str) -> None:  # noqa: ARG001
    for _, fate in parts(right):
        if "lives in " in fate:
            assert any(name.startswith("tests/") for name in quoted(fate))


@pytest.mark.parametrize("section", SECTIONS)
def test_each_row_of_a_section_has_a_fate(section: str) -> None:
    assert [left for left, right in read_rows(section) if not any(fate in right for fate in FATES)] == []


def claims() -> Iterator[tuple[str, str]]:
    """Yield each place of the package with what is claimed of it: the last claim before it in its part.

    If a part names a module, a room or a class, the claim is made of every name of the original that is
    defined there under the same name, too.
    """
    parts_of_rows = [part for _, right in ROWS for part in right.split("<br>")]
    for part in [*parts_of_rows, *(right for section in SECTIONS for _, right in read_rows(section))]:
        claim = ""
        if "lives in" not in part:
            continue
        names = quoted(part.partition(": ")[0]) if part in parts_of_rows else []
        for found in re.finditer(r"(\*[a-z ]+\*)|`(monolith(?:_compat|_bench)?\.[\w.]+)`", part):
            if found[1]:
                claim = found[1]
                continue
            yield found[2], claim
            for name in names:
                if hasattr(resolve(found[2]), name):
                    yield f"{found[2]}.{name}", claim


def resolve(dotted: str) -> object:
    """Return the module or attribute of this name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        parent, _, last = dotted.rpartition(".")
        return getattr(resolve(parent), last) if parent else pytest.fail(f"no {dotted}")


CLAIMS = sorted(set(claims()))


@pytest.fixture(scope="module")
def is_used() -> Iterator[partial[bool]]:
    """Whether a run uses a place, as the source of the commands says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        tool = importlib.import_module("follow_names")
        package = tool.read_packages(*(tool.SOURCE / name for name in tool.PACKAGES))
        yield partial(tool.is_used, reached=package.reached_from(tool.commands_of_runs()), package=package)


@pytest.mark.parametrize("place, claim", CLAIMS)
def test_each_place_says_truly_whether_a_run_uses_it(place: str, claim: str, is_used: partial[bool]) -> None:
    assert claim in (USED, UNUSED), f"say of {place} whether it is {USED} or {UNUSED}"
    assert claim == (USED if is_used(place) else UNUSED)


@pytest.mark.parametrize("name", PLACES)
def test_each_place_is_there(name: str) -> None:
    if "/" in name:
        assert (ROOT / name).is_file()
    else:
        resolve(name)
