"""Compatibility: what the original offered and nothing here uses.

Kept for who moves code over from there, and tested as everything else is.
"""

from monolith_compat.async_functions import AsyncFunctions
from monolith_compat.devices import Devices, cuda_variables, visible_gpu
from monolith_compat.feature_sharding import shard_features
from monolith_compat.gathering import (
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
    gather_embeddings_by_input,
    gather_embeddings_by_input_gradient,
    map_id_to_embedding,
)
from monolith_compat.job_alerts import parse_job_alert
from monolith_compat.nested import NestedTensors
from monolith_compat.offset_maps import (
    OffsetMap,
    fill_with_offset_map,
    finalize_shared_tensor,
    unique_key_with_value_and_offset,
)
from monolith_compat.packing import (
    aligned_flat_concat,
    aligned_flat_split,
    merge_dicts,
    pack_tensors,
    pack_typed_keyed_tensors,
    split_tensors_with_type,
    unpack_packed_tensors,
    unpack_tensors,
)
from monolith_compat.params import (
    InstantiableParams,
    Params,
    allowed_kwargs,
    copy_params_to,
    params,
    update_params,
    with_params,
)
from monolith_compat.pooling import (
    fused_reduce_and_split,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
    reduce_mean,
    reduce_sqrtn,
    reduce_sum,
)
from monolith_compat.ragged_encoding import ParseSteps, contract_ragged, expand_ragged
from monolith_compat.reshape import StaticReshapeNBuilder, static_reshape
from monolith_compat.sharding import (
    FusedReorder,
    fused_reorder_by_indices,
    ragged_split_by_indices,
    reorder_by_indices,
    shard_of_ids,
    split_by_indices,
)
from monolith_compat.uniqueness import Unique, unique_in_order

__all__ = [
    "AsyncFunctions",
    "Devices",
    "FusedReorder",
    "InstantiableParams",
    "NestedTensors",
    "OffsetMap",
    "Params",
    "ParseSteps",
    "StaticReshapeNBuilder",
    "Unique",
    "aligned_flat_concat",
    "aligned_flat_split",
    "allowed_kwargs",
    "contract_ragged",
    "copy_params_to",
    "cuda_variables",
    "expand_ragged",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_sorted_segment_sum",
    "gather_embeddings_by_input",
    "gather_embeddings_by_input_gradient",
    "map_id_to_embedding",
    "merge_dicts",
    "pack_tensors",
    "pack_typed_keyed_tensors",
    "params",
    "parse_job_alert",
    "ragged_split_by_indices",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
    "reorder_by_indices",
    "shard_features",
    "shard_of_ids",
    "split_by_indices",
    "split_tensors_with_type",
    "static_reshape",
    "unique_in_order",
    "unique_key_with_value_and_offset",
    "unpack_packed_tensors",
    "unpack_tensors",
    "update_params",
    "visible_gpu",
    "with_params",
]
