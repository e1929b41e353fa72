"""Ops of features: fids, combiners, slices, layouts, and lookups through a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from vectors.case import Case, floats, id_tensor

from monolith.feature import (
    CONCAT,
    Combiner,
    FeatureColumn,
    FeatureIds,
    FeatureSlot,
    FirstN,
    GatheredBatch,
    Gatherer,
    InputSpec,
    Layout,
    LayoutKind,
    LayoutSpec,
    Mean,
    SliceSpec,
    SlotConfig,
    Sum,
    combine,
    convert_v1_to_v2,
    make_combiner,
    make_fid,
    plan_layouts,
    signature_of,
    slot_of,
    switch_slot,
)
from monolith.model import EmbeddingCollection, EmbeddingOptimizer, UpdateConfig, apply_gradients
from monolith.nn import GradClipType
from monolith.table import Constant, Fp32, Sgd, from_upstream
from monolith.tensors import RaggedTensor
from monolith_compat import shard_of_ids
from monolith_compat.feature_sharding import ShardedFeature, shard_features

# Fids


def unsigned(fid: int) -> int:
    return fid & (1 << 64) - 1


def make_of(version: int) -> Callable[[Case], Any]:
    def make(case: Case) -> Any:
        fid = make_fid(int(case.inputs["slot"]), int(case.inputs["signature"]), version)
        assert int(make_fid(int(case.inputs["slot"]), id_tensor([case.inputs["signature"]]), version)) == fid
        return {
            "value": unsigned(fid),
            "slot": slot_of(fid, version),
            "signature": signature_of(fid, version),
        }

    return make


def fid_v1_to_v2(case: Case) -> Any:
    return {"v2": unsigned(convert_v1_to_v2(int(case.inputs["v1"])))}


def slot_id_v2(case: Case) -> Any:
    return {"slot": slot_of(int(case.inputs["fid"]))}


def switch(case: Case) -> Any:
    fid = switch_slot(int(case.inputs["fid"]), case.inputs["slot"], case.params["version"])
    return {"fid": unsigned(fid)}


def shard_of_fid(case: Case) -> Any:
    return {"shards": shard_of_ids(id_tensor(case.inputs["fids"]), case.params["num_shards"])}


# Combiners


def splits_of(inputs: Mapping[str, Any]) -> Tensor:
    if "row_splits" in inputs:
        return torch.tensor(inputs["row_splits"])
    return torch.tensor([0, *inputs["row_lengths"]]).cumsum(0)


def combiner_of(params: Mapping[str, Any], key: str = "type") -> Combiner:
    return make_combiner(params[key], params.get("n"))


def combiner(case: Case) -> Any:
    return {
        "out": combine(combiner_of(case.params), splits_of(case.inputs), floats(case.inputs["embeddings"]))
    }


def embedding_slices(case: Case) -> Any:
    pooled = combine(
        combiner_of(case.params, "combiner"), splits_of(case.inputs), floats(case.inputs["embeddings"])
    )
    return {"slices": [part.tolist() for part in pooled.split(case.params["slice_dims"], dim=-1)]}


def size_tensor(case: Case) -> Any:
    splits = splits_of(case.inputs)
    ids = RaggedTensor(torch.arange(int(splits[-1])), splits)
    return {"mask": FirstN(case.params["max_seq_length"]).mask(ids)}


# Layouts

POOLING: dict[str, Callable[[int], Combiner]] = {
    "SUM": lambda _: Sum(),
    "MEAN": lambda _: Mean(),
    "FIRSTN": FirstN,
}


def gathered(case: Case) -> tuple[GatheredBatch, Gatherer, Tensor]:
    configs, batch = case.params["feature_configs"], case.inputs["batch"]
    features = [
        InputSpec(name, config["table"], POOLING[config["pooling"]](config["max_sequence_length"]))
        for name, config in configs.items()
    ]
    layouts = [
        LayoutSpec(name, LayoutKind[out["type"]], tuple(SliceSpec(*part) for part in out["slices"]))
        for name, out in case.params["out_configs"].items()
    ]
    tables = {config["table"]: sum(config["slice_dims"]) for config in configs.values()}
    gatherer = Gatherer(plan_layouts(tables, features, layouts))
    ids = {
        name: RaggedTensor.from_list(batch[name]["rows"], dtype=torch.int64)
        for name in batch
        if name != "batch_size"
    }
    found = gatherer.read(FeatureIds.pack(ids))
    embeddings = case.inputs["embeddings"]
    rows = torch.cat([floats(embeddings[str(fid)]) for fid in found.ids.tolist()])
    return found, gatherer, rows


def embedding_to_layout(case: Case) -> Any:
    found, gatherer, rows = gathered(case)
    for kind in (rows, rows.double()):  # by the core, then by torch
        outputs = found.outputs(kind)
    native = found.outputs(rows)
    torch.testing.assert_close([output.double() for output in native], list(outputs))
    return {
        "layouts": {
            name: [native[number] for number in numbers] for name, numbers in gatherer.plan.names.items()
        }
    }


def embedding_to_layout_grad(case: Case) -> Any:
    found, gatherer, rows = gathered(case)
    rows.requires_grad_()
    outputs = found.outputs(rows)
    used = [outputs[n] for name in case.inputs["out_used"] for n in gatherer.plan.names[name]]
    torch.autograd.backward(used, [torch.full_like(out, case.inputs["upstream_grad"]) for out in used])
    assert rows.grad is not None
    at, by_fid = 0, {}
    for fid in found.ids.tolist():
        width = len(case.inputs["embeddings"][str(fid)])
        by_fid[str(fid)] = rows.grad[at : at + width].tolist()
        at += width
    return {
        "fid_grads": {
            name: {fid: by_fid[fid] for fid in wanted}
            for name, wanted in case.vector["expected"]["fid_grads"].items()
        }
    }


def sharding_sparse_fids(case: Case) -> Any:
    batch = FeatureIds.pack(
        {
            name: RaggedTensor.from_list(rows, dtype=torch.int64, ragged_rank=1)
            for name, rows in case.inputs["features"].items()
        }
    )
    features = {
        name: ShardedFeature(config["table"], sum(config["slice_dims"]))
        for name, config in case.params["feature_configs"].items()
    }
    found = shard_features(
        batch,
        features,
        case.params["ps_num"],
        unique=case.params["unique"],
        version=case.params["version"],
    )
    return {
        "fid_list": [fids.tolist() for fids in found.fids],
        "fid_offset": found.pointers,
        "feature_offset": found.cell_offsets,
        "nfl_offset": found.feature_offsets,
    }


# Lookups through a store. Upstream's two parameter servers hold what one store holds here.


def slots_of(dims: Mapping[str, list[int]], **config: Any) -> dict[str, FeatureColumn]:
    columns = {}
    for name, widths in dims.items():
        slot = FeatureSlot(SlotConfig(name=name, has_bias=True, **config))
        for width in widths[1:]:
            slot.add_slice(width)
        columns[name] = FeatureColumn(slot, name)
    return columns


def slice_layout(columns: Mapping[str, FeatureColumn], name: str, number: int) -> Layout:
    having = [column for column in columns.values() if len(column.slot.slices) > number]
    return Layout(name, CONCAT, [column.lookup(column.slot.slices[number]) for column in having])


def partitioned_lookup(case: Case) -> Any:
    inputs, shards = case.inputs, case.inputs["num_ps"]
    columns = slots_of({name: case.params["slice_dims"][name] for name in case.params["feature_order"]})
    collection = EmbeddingCollection(
        [slice_layout(columns, name, number) for number, name in enumerate(("bias", "vec", "deep"))]
    )
    for name, width in collection.store.tables.items():
        ids = torch.tensor([shard + shards * j for shard in range(shards) for j in range(width)])
        collection.store.table(name).assign(ids, torch.full((len(ids), width), inputs["assigned_value"]))
    with torch.no_grad():
        return collection({name: id_tensor(inputs[name]) for name in columns})


def partitioned_apply(case: Case) -> Any:
    params, value = case.params, case.inputs["initial_value"]

    def optimizer(spec: Mapping[str, Any]) -> Any:
        return from_upstream(*next(iter(spec.items())))

    columns = slots_of(
        {"uid": [1, 4]},
        bias_optimizer=optimizer(params["bias_opt"]),
        bias_learning_rate=params["lr"],
        bias_initializer=Constant(value),
        optimizer=optimizer(params["vec_opt"]),
        learning_rate=params["lr"],
        initializer=Constant(value),
        compressor=Fp32(),
    )
    collection = EmbeddingCollection([slice_layout(columns, "bias", 0), slice_layout(columns, "vec", 1)])
    collection.store.table("uid").assign(id_tensor([7]), torch.full((1, 5), value))
    sparse = EmbeddingOptimizer(collection)
    out = collection({"uid": id_tensor([7])})
    torch.autograd.backward(
        [out["bias"], out["vec"]],
        [torch.full_like(out[name], case.inputs["layout_grad"]) for name in ("bias", "vec")],
    )
    sparse.step()
    row = collection.store.table("uid").lookup(id_tensor([7]))[0]
    assert torch.equal(row[1:], row[1:2].expand(4))
    return {"bias_after": row[0], "vec_after": row[1]}


def apply_gradients_step(case: Case) -> Any:
    """`loss` is `sum(emb[:3]) + var` and both optimizers are plain descent with a rate of 1."""
    embedding = case.inputs["emb"]
    slot = FeatureSlot(SlotConfig(name="f", optimizer=Sgd(), learning_rate=1.0, compressor=Fp32()))
    whole = slot.add_slice(len(embedding))
    collection = EmbeddingCollection([Layout("f", CONCAT, [FeatureColumn(slot, "f").lookup(whole)])])
    collection.store.table("f").assign(id_tensor([1]), floats([embedding]))
    var = torch.nn.Parameter(torch.tensor(case.inputs["var"]))
    sparse, dense = EmbeddingOptimizer(collection), torch.optim.SGD([var], lr=1.0)
    loss = collection({"f": id_tensor([1])})["f"][0, :3].sum() + var
    config = UpdateConfig(
        clip_type=GradClipType[case.params["clip_type"]], clip_norm=case.params["clip_norm"]
    )
    apply_gradients(loss, sparse, dense, config)
    return {
        "var": var.item(),
        "emb": collection.store.table("f").lookup(id_tensor([1]))[0],
        "global_step": sparse.global_step,
    }


OPS: dict[str, Callable[[Case], Any]] = {
    "fid_v1_make": make_of(1),
    "fid_v2_make": make_of(2),
    "fid_v1_to_v2": fid_v1_to_v2,
    "slot_id_v2": slot_id_v2,
    "switch_slot": switch,
    "shard_of_fid": shard_of_fid,
    "combiner": combiner,
    "embedding_slices": embedding_slices,
    "size_tensor": size_tensor,
    "embedding_to_layout": embedding_to_layout,
    "embedding_to_layout_grad": embedding_to_layout_grad,
    "sharding_sparse_fids": sharding_sparse_fids,
    "partitioned_lookup": partitioned_lookup,
    "partitioned_apply": partitioned_apply,
    "apply_gradients_step": apply_gradients_step,
}
