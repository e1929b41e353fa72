from monolith_compat.async_functions import AsyncFunctions as AsyncFunctions
from monolith_compat.devices import (
    Devices as Devices,
)
from monolith_compat.devices import (
    cuda_variables as cuda_variables,
)
from monolith_compat.devices import (
    visible_gpu as visible_gpu,
)
from monolith_compat.feature_sharding import shard_features as shard_features
from monolith_compat.gathering import (
    fused_gather_embeddings_by_input as fused_gather_embeddings_by_input,
)
from monolith_compat.gathering import (
    fused_gather_embeddings_by_input_gradient as fused_gather_embeddings_by_input_gradient,
)
from monolith_compat.gathering import (
    gather_embeddings_by_input as gather_embeddings_by_input,
)
from monolith_compat.gathering import (
    gather_embeddings_by_input_gradient as gather_embeddings_by_input_gradient,
)
from monolith_compat.gathering import (
    map_id_to_embedding as map_id_to_embedding,
)
from monolith_compat.hyperparams import (
    InstantiableParams as InstantiableParams,
)
from monolith_compat.hyperparams import (
    Params as Params,
)
from monolith_compat.hyperparams import (
    allowed_kwargs as allowed_kwargs,
)
from monolith_compat.hyperparams import (
    copy_params_to as copy_params_to,
)
from monolith_compat.hyperparams import (
    params as params,
)
from monolith_compat.hyperparams import (
    update_params as update_params,
)
from monolith_compat.hyperparams import (
    with_params as with_params,
)
from monolith_compat.job_alerts import parse_job_alert as parse_job_alert
from monolith_compat.nested import NestedTensors as NestedTensors
from monolith_compat.offset_maps import (
    OffsetMap as OffsetMap,
)
from monolith_compat.offset_maps import (
    fill_with_offset_map as fill_with_offset_map,
)
from monolith_compat.offset_maps import (
    finalize_shared_tensor as finalize_shared_tensor,
)
from monolith_compat.offset_maps import (
    unique_key_with_value_and_offset as unique_key_with_value_and_offset,
)
from monolith_compat.packing import (
    aligned_flat_concat as aligned_flat_concat,
)
from monolith_compat.packing import (
    aligned_flat_split as aligned_flat_split,
)
from monolith_compat.packing import (
    merge_dicts as merge_dicts,
)
from monolith_compat.packing import (
    pack_tensors as pack_tensors,
)
from monolith_compat.packing import (
    pack_typed_keyed_tensors as pack_typed_keyed_tensors,
)
from monolith_compat.packing import (
    split_tensors_with_type as split_tensors_with_type,
)
from monolith_compat.packing import (
    unpack_packed_tensors as unpack_packed_tensors,
)
from monolith_compat.packing import (
    unpack_tensors as unpack_tensors,
)
from monolith_compat.pooling import (
    fused_reduce_and_split as fused_reduce_and_split,
)
from monolith_compat.pooling import (
    fused_reduce_sum_and_split as fused_reduce_sum_and_split,
)
from monolith_compat.pooling import (
    fused_sorted_segment_sum as fused_sorted_segment_sum,
)
from monolith_compat.pooling import (
    reduce_mean as reduce_mean,
)
from monolith_compat.pooling import (
    reduce_sqrtn as reduce_sqrtn,
)
from monolith_compat.pooling import (
    reduce_sum as reduce_sum,
)
from monolith_compat.ragged_encoding import (
    ParseSteps as ParseSteps,
)
from monolith_compat.ragged_encoding import (
    contract_ragged as contract_ragged,
)
from monolith_compat.ragged_encoding import (
    expand_ragged as expand_ragged,
)
from monolith_compat.reshape import (
    StaticReshapeNBuilder as StaticReshapeNBuilder,
)
from monolith_compat.reshape import (
    static_reshape as static_reshape,
)
from monolith_compat.sharding import (
    FusedReorder as FusedReorder,
)
from monolith_compat.sharding import (
    fused_reorder_by_indices as fused_reorder_by_indices,
)
from monolith_compat.sharding import (
    ragged_split_by_indices as ragged_split_by_indices,
)
from monolith_compat.sharding import (
    reorder_by_indices as reorder_by_indices,
)
from monolith_compat.sharding import (
    shard_of_ids as shard_of_ids,
)
from monolith_compat.sharding import (
    split_by_indices as split_by_indices,
)
from monolith_compat.uniqueness import Unique as Unique
from monolith_compat.uniqueness import unique_in_order as unique_in_order
