"""Ops of tensors: ragged, nested, packed, spread over shards, pooled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vectors.case import Case, floats, id_tensor

import monolith_compat as compat
from monolith import tensors
from monolith.tensors import RaggedTensor


def ids(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ragged_ids(rows: Any, ragged_rank: int = 1) -> RaggedTensor:
    return RaggedTensor.from_list(rows, dtype=torch.int64, ragged_rank=ragged_rank)


def gradient(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, inputs, grads))


# Sharding


def split_by_indices(case: Case) -> Any:
    parts = compat.split_by_indices(
        ids(case.inputs["indices"]), ids(case.inputs["tensor"]), case.params["num_splits"]
    )
    return {"splits": [part.tolist() for part in parts]}


def split_by_indices_grad(case: Case) -> Any:
    tensor = floats(case.inputs["tensor"]).requires_grad_()
    parts = compat.split_by_indices(ids(case.inputs["indices"]), tensor, case.params["num_splits"])
    grads = [
        floats(grad).reshape(part.shape) for grad, part in zip(case.inputs["split_grads"], parts, strict=True)
    ]
    return {"grad": gradient(parts, [tensor], grads)[0]}


def ragged_split_by_indices(case: Case) -> Any:
    splits, pos = compat.ragged_split_by_indices(
        ids(case.inputs["indices"]), ragged_ids(case.inputs["ragged"]), case.params["num_splits"]
    )
    return {"splits": [part.to_list() for part in splits], "pos": [part.to_list() for part in pos]}


def reorder_by_indices(case: Case) -> Any:
    output, sizes = compat.reorder_by_indices(
        id_tensor(case.inputs["input"]), ids(case.inputs["shard_ids"]), case.params["num_of_shards"]
    )
    return {
        "output_as_sets": [sorted(part.tolist()) for part in output.split(sizes.tolist())],
        # Upstream's order, which documents and does not bind.
        "output_reversed_within_shard": [
            i for part in output.split(sizes.tolist()) for i in part.tolist()[::-1]
        ],
        "shard_sizes": sizes,
    }


def fused_reorder_by_indices(case: Case) -> Any:
    result = compat.fused_reorder_by_indices(
        [id_tensor(one) for one in case.inputs["inputs"]],
        case.params["num_of_shards"],
        case.params["dim_sizes"],
        case.params.get("rank0_empty", False),
    )
    offsets = [one.tolist() for one in result.embedding_offsets]
    return {**result._asdict(), "embedding_offsets": offsets}


# Offset maps


def unique_key_with_value_and_offset(case: Case) -> Any:
    unique_key, value_offset, size = compat.unique_key_with_value_and_offset(
        ragged_ids(case.inputs["key"]), case.params["dims"]
    )
    return {"unique_key": unique_key.to_list(), "value_offset": value_offset.to_list(), "buffer_size": size}


def fill_with_offset_map(case: Case) -> Any:
    buffer = compat.fill_with_offset_map(
        ragged_ids(case.inputs["pos"]),
        floats(case.inputs["value"]),
        ragged_ids(case.inputs["value_offset"], 2),
        torch.zeros(case.inputs["buffer_size"]),
        case.params["dims"],
    )
    return {"buffer": buffer}


def fill_with_offset_map_grad(case: Case) -> Any:
    grad, dims = floats(case.inputs["grad"]), case.params["dims"]
    size = sum(len(row) * dim for row, dim in zip(case.inputs["pos"], dims, strict=True))
    value = torch.zeros(size, requires_grad=True)
    buffer = compat.fill_with_offset_map(
        ragged_ids(case.inputs["pos"]),
        value,
        ragged_ids(case.inputs["value_offset"], 2),
        torch.zeros_like(grad),
        dims,
    )
    return {"grad": gradient([compat.finalize_shared_tensor([buffer])], [value], [grad])[0]}


# Gathering


def map_id_to_embedding(case: Case) -> Any:
    output = compat.map_id_to_embedding(
        [id_tensor(one) for one in case.inputs["ids"]],
        [floats(rows) for rows in case.inputs["embeddings"]],
        ids(case.inputs["input"]),
    )
    return {"output": output}


def map_id_to_embedding_grad(case: Case) -> Any:
    grads = floats(case.inputs["grads"])
    lists = [id_tensor(one) for one in case.inputs["ids"]]
    embeddings = [torch.zeros(len(one), grads.shape[-1], requires_grad=True) for one in lists]
    output = compat.map_id_to_embedding(lists, embeddings, ids(case.inputs["input"]))
    return {"grads": [grad.tolist() for grad in gradient([output], embeddings, [grads])]}


def gather_embeddings_by_input(case: Case) -> Any:
    output, index_mapping = compat.gather_embeddings_by_input(
        id_tensor(case.inputs["ids"]), floats(case.inputs["embeddings"]), ids(case.inputs["input"])
    )
    return {"output": output, "index_mapping": index_mapping}


def gather_embeddings_by_input_grad(case: Case) -> Any:
    grad = compat.gather_embeddings_by_input_gradient(
        id_tensor(case.inputs["ids"]), floats(case.inputs["grads"]), ids(case.inputs["index_mapping"])
    )
    return {"grad": grad}


def fused_gather_embeddings_by_input(case: Case) -> Any:
    outputs = compat.fused_gather_embeddings_by_input(
        floats(case.inputs["fused_embeddings"]),
        [ids(one) for one in case.inputs["offsets"]],
        case.params["dims"],
    )
    return {"outputs": [output.tolist() for output in outputs]}


def fused_gather_embeddings_by_input_grad(case: Case) -> Any:
    grad = compat.fused_gather_embeddings_by_input_gradient(
        case.inputs["size"],
        [floats(one) for one in case.inputs["grads"]],
        [ids(one) for one in case.inputs["offsets"]],
        case.params["dims"],
        case.params.get("scale", 1.0),
    )
    return {"grad": grad}


# Pooling


def pooled(reduce: Callable[..., Tensor]) -> Callable[[Case], Any]:
    def run(case: Case) -> Any:
        rows, values = ids(case.inputs["indices"]), floats(case.inputs["values"])
        return {"out": reduce(rows, values, case.params["batch"])}

    return run


def pooled_grad(reduce: Callable[..., Tensor]) -> Callable[[Case], Any]:
    def run(case: Case) -> Any:
        values = floats(case.inputs["values"]).requires_grad_()
        out = reduce(ids(case.inputs["indices"]), values, case.params["batch"])
        return {"grad": gradient([out], [values], [floats(case.inputs["grads"])])[0]}

    return run


def fused_reduce_sum_and_split(case: Case) -> Any:
    outputs = compat.fused_reduce_sum_and_split(
        ids(case.inputs["indices"]),
        floats(case.inputs["values"]),
        case.params["batch"],
        case.params["split_dims"],
    )
    return {"outputs": [output.tolist() for output in outputs]}


def segment_sum(case: Case) -> Any:
    values = floats(case.inputs["values"])
    shape = (case.inputs["rows"], *values.shape[1:])
    return {"out": compat.fused_sorted_segment_sum([ids(case.inputs["indices"])], [values], [shape])[0]}


# Ragged, reshaped, packed, nested


def normalize_merged_split(case: Case) -> Any:
    return {
        "out": tensors.normalize_merged_split(
            ids(case.inputs["row_split"]), ids(case.inputs["row_split_size"])
        )
    }


def value_rowids(case: Case) -> Any:
    splits = ids(case.inputs["row_splits"])
    return {"rowids": tensors.fused_value_rowids(RaggedTensor(torch.zeros(int(splits[-1])), splits))}


def gen_seq_mask(case: Case) -> Any:
    return {"mask": tensors.gen_seq_mask(ids(case.inputs["row_splits"]), case.params["max_seq_length"])}


def static_reshape(case: Case) -> Any:
    outputs, sizes = compat.static_reshape(
        [torch.zeros(shape) for shape in case.inputs["shapes_in"]], case.inputs["targets"]
    )
    return {"sizes": sizes, "shapes_out": [list(output.shape) for output in outputs]}


def static_reshape_builder(case: Case) -> Any:
    builder = compat.StaticReshapeNBuilder()
    indices = [builder.add(ids(item), case.inputs["target"]) for item in case.inputs["items"]]
    outputs, sizes = builder.build()
    return {"outputs": [output.tolist() for output in outputs], "indices": indices, "sizes": sizes}


def pack_tensors(case: Case) -> Any:
    packed, sizes = compat.pack_tensors({key: ids(value) for key, value in case.inputs["tensors"].items()})
    return {"packed": packed, "sizes": sizes}


def pack_typed_keyed_tensors(case: Case) -> Any:
    groups = [{key: torch.zeros(shape) for key, shape in group.items()} for group in case.inputs["groups"]]
    packed = compat.pack_typed_keyed_tensors(groups)
    unpacked = compat.unpack_packed_tensors(case.inputs["groups"], packed)
    assert [{key: list(t.shape) for key, t in group.items()} for group in unpacked] == case.inputs["groups"]
    return {"size_vector": packed[-1]}


def nested_tensors(case: Case) -> Any:
    """Floats of the vector stand for tensors; the containers named are tuples."""
    nested = {
        key: tuple(value) if key in case.inputs.get("tuple_paths", ()) else value
        for key, value in case.inputs["nested"].items()
    }
    nested = tensors.map_leaves(lambda leaf: torch.tensor(leaf) if isinstance(leaf, float) else leaf, nested)
    flat = compat.NestedTensors(nested)
    found = flat.get_tensors()
    zeroed = flat.get_nested_result([torch.zeros_like(tensor) for tensor in found])
    shown = tensors.map_leaves(lambda leaf: leaf.item() if isinstance(leaf, Tensor) else leaf, zeroed)
    return {"num_tensors": len(found), "after_zeroing": shown}


OPS: dict[str, Callable[[Case], Any]] = {
    "split_by_indices": split_by_indices,
    "split_by_indices_grad": split_by_indices_grad,
    "ragged_split_by_indices": ragged_split_by_indices,
    "unique_key_with_value_and_offset": unique_key_with_value_and_offset,
    "fill_with_offset_map": fill_with_offset_map,
    "fill_with_offset_map_grad": fill_with_offset_map_grad,
    "reorder_by_indices": reorder_by_indices,
    "fused_reorder_by_indices": fused_reorder_by_indices,
    "map_id_to_embedding": map_id_to_embedding,
    "map_id_to_embedding_grad": map_id_to_embedding_grad,
    "gather_embeddings_by_input": gather_embeddings_by_input,
    "gather_embeddings_by_input_grad": gather_embeddings_by_input_grad,
    "fused_gather_embeddings_by_input": fused_gather_embeddings_by_input,
    "fused_gather_embeddings_by_input_grad": fused_gather_embeddings_by_input_grad,
    "reduce_sum": pooled(compat.reduce_sum),
    "reduce_mean": pooled(compat.reduce_mean),
    "reduce_sqrtn": pooled(compat.reduce_sqrtn),
    "reduce_sum_grad": pooled_grad(compat.reduce_sum),
    "reduce_mean_grad": pooled_grad(compat.reduce_mean),
    "reduce_sqrtn_grad": pooled_grad(compat.reduce_sqrtn),
    "fused_reduce_sum_and_split": fused_reduce_sum_and_split,
    "segment_sum": segment_sum,
    "normalize_merged_split": normalize_merged_split,
    "static_reshape": static_reshape,
    "static_reshape_builder": static_reshape_builder,
    "value_rowids": value_rowids,
    "gen_seq_mask": gen_seq_mask,
    "pack_tensors": pack_tensors,
    "pack_typed_keyed_tensors": pack_typed_keyed_tensors,
    "nested_tensors": nested_tensors,
}
