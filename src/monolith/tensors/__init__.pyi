from monolith.tensors.handover import leaves, map_leaves
from monolith.tensors.queues import Prefetched, PrefetchQueue, prefetch
from monolith.tensors.ragged import (
    RaggedTensor,
    fused_value_rowids,
    gen_seq_mask,
    maybe_squeeze_3d_tensor,
    normalize_merged_split,
    ranges,
)

__all__ = [
    "PrefetchQueue",
    "Prefetched",
    "RaggedTensor",
    "fused_value_rowids",
    "gen_seq_mask",
    "leaves",
    "map_leaves",
    "maybe_squeeze_3d_tensor",
    "normalize_merged_split",
    "prefetch",
    "ranges",
]
