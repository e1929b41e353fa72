"""Tensors as a recommender needs them: ragged, nested, packed, spread over shards, and queued."""

from monolith.tensors.async_functions import AsyncFunctions
from monolith.tensors.gathering import (
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
    gather_embeddings_by_input,
    gather_embeddings_by_input_gradient,
    map_id_to_embedding,
)
from monolith.tensors.nested import NestedTensors
from monolith.tensors.offset_maps import (
    OffsetMap,
    fill_with_offset_map,
    finalize_shared_tensor,
    unique_key_with_value_and_offset,
)
from monolith.tensors.packing import (
    aligned_flat_concat,
    aligned_flat_split,
    merge_dicts,
    pack_tensors,
    pack_typed_keyed_tensors,
    split_tensors_with_type,
    unpack_packed_tensors,
    unpack_tensors,
)
from monolith.tensors.pooling import (
    fused_reduce_and_split,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
    reduce_mean,
    reduce_sqrtn,
    reduce_sum,
)
from monolith.tensors.queues import Prefetched, PrefetchQueue, prefetch
from monolith.tensors.ragged import (
    RaggedTensor,
    fused_value_rowids,
    gen_seq_mask,
    maybe_squeeze_3d_tensor,
    normalize_merged_split,
    ranges,
)
from monolith.tensors.ragged_encoding import ParseSteps, contract_ragged, expand_ragged
from monolith.tensors.reshape import StaticReshapeNBuilder, static_reshape
from monolith.tensors.sharding import (
    FusedReorder,
    fused_reorder_by_indices,
    ragged_split_by_indices,
    reorder_by_indices,
    shard_of_ids,
    split_by_indices,
)
from monolith.tensors.structure import leaves, map_leaves
from monolith.tensors.uniqueness import Unique, unique_in_order

__all__ = [
    "AsyncFunctions",
    "FusedReorder",
    "NestedTensors",
    "OffsetMap",
    "ParseSteps",
    "PrefetchQueue",
    "Prefetched",
    "RaggedTensor",
    "StaticReshapeNBuilder",
    "Unique",
    "aligned_flat_concat",
    "aligned_flat_split",
    "contract_ragged",
    "expand_ragged",
    "fill_with_offset_map",
    "finalize_shared_tensor",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_sorted_segment_sum",
    "fused_value_rowids",
    "gather_embeddings_by_input",
    "gather_embeddings_by_input_gradient",
    "gen_seq_mask",
    "leaves",
    "map_id_to_embedding",
    "map_leaves",
    "maybe_squeeze_3d_tensor",
    "merge_dicts",
    "normalize_merged_split",
    "pack_tensors",
    "pack_typed_keyed_tensors",
    "prefetch",
    "ragged_split_by_indices",
    "ranges",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
    "reorder_by_indices",
    "shard_of_ids",
    "split_by_indices",
    "split_tensors_with_type",
    "static_reshape",
    "unique_in_order",
    "unique_key_with_value_and_offset",
    "unpack_packed_tensors",
    "unpack_tensors",
]
