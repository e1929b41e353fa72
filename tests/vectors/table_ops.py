"""Ops of the table: rows, optimizers, filters, touched keys, files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vectors.case import Case, floats, id_tensor

import monolith.native
import monolith.table
from monolith.table import (
    Constant,
    Expiry,
    FixedR8,
    Fp16,
    Fp32,
    OneBit,
    Ones,
    Optimizer,
    PolynomialDecay,
    RandomUniform,
    Segment,
    Zeros,
    from_upstream,
    legacy_names,
    merged_name,
)
from monolith.table.compressors import Compressor, round_to_half
from monolith.table.config import Initializer
from monolith.table.update_rules import state_views


def optimizer_of(spec: Any) -> Optimizer:
    """Read `"sgd"` or `{"adagrad": {...}}`."""
    kind, config = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    return from_upstream(kind, config)


def initializer_of(spec: Any) -> Initializer:
    """Read `"zeros"`, `{"constants": 3.0}` or `{"random_uniform": {"minval": ..., "maxval": ...}}`."""
    kind, config = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    if kind == "constants":
        return Constant(config["constant"] if isinstance(config, Mapping) else config)
    if kind == "random_uniform":
        return RandomUniform(low=config.get("minval", -0.05), high=config.get("maxval", 0.05))
    return {"zeros": Zeros(), "ones": Ones()}[kind]


def compressor_of(kind: str, config: Mapping[str, Any]) -> Compressor:
    """Read a compressor by its proto names; absent settings have their proto defaults."""
    if kind == "fixed_r8":
        return FixedR8(config.get("r", 1.0))
    if kind == "one_bit":
        return OneBit(**{"amplitude": 0.1, **{name: v for name, v in config.items() if name != "type"}})
    return {"fp32": Fp32(), "fp16": Fp16()}[kind]


def segment_of(spec: Mapping[str, Any]) -> Segment:
    return Segment(
        dim=spec["dim_size"],
        optimizer=optimizer_of(spec.get("opt", "sgd")),
        initializer=initializer_of(spec.get("init", "zeros")),
    )


def plain_segment(params: Mapping[str, Any], dim: int | None = None) -> Segment:
    """Read `{"dim": .., "init": .., "opt": .., "lr": ..}`; what is absent is the default test table's."""
    return Segment(
        dim=params.get("dim", 1) if dim is None else dim,
        optimizer=optimizer_of(params.get("opt", "sgd")),
        initializer=initializer_of(params.get("init", "zeros")),
        learning_rate=params.get("lr", 1.0),
    )


def expiry_of(params: Mapping[str, Any]) -> Expiry:
    per_slot = {int(slot): days for slot, days in params.get("slot_expire_days", {}).items()}
    return Expiry.days(params.get("default_expire_days", 36500), per_slot)


def filter_of(params: Mapping[str, Any], threshold: int) -> Any:
    kind = params.get("filter", "sliding")
    if kind == "dummy":
        return None
    thresholds = monolith.table.SlotThresholds(default=threshold)
    if kind == "probabilistic":
        return monolith.table.ProbabilisticFilter(thresholds)
    return monolith.table.SlidingFilter(
        capacity=params.get("capacity", 1_000_000),
        split_num=params.get("split_num", 7),
        thresholds=thresholds,
    )


# Optimizers, initializers, compressors, rates

_STATE_ALIASES = {"z": "zero", "s": "grad_square_sum", "p1": "beta1_power", "p2": "beta2_power"}


def sparse_optimizer(case: Case) -> Any:
    params, key = case.params, id_tensor([1])
    segment = Segment(dim=params["dim"], optimizer=from_upstream(params["type"], params["config"]))
    table = case.table(segment)
    table.assign(key, floats([case.inputs["init_value"]]))
    values = []
    for number, step in enumerate(case.inputs["steps"]):
        table.apply_gradients(
            key,
            floats([step["grad"]]),
            step=step.get("global_step", number),
            learning_rates=floats([step["lr"]]),
            latest_values=floats([step["latest_value"]]) if "latest_value" in step else None,
        )
        values.append(table.lookup(key)[0])
    state = state_views(segment.optimizer, table.lookup_rows(key)[1].state[0].numpy(), segment.dim)
    shown = {
        field.name: state[field.name] if field.shape == "vector" else state[field.name][0]
        for field in segment.optimizer.state_fields
    }
    shown |= {alias: shown[name] for alias, name in _STATE_ALIASES.items() if name in shown}
    return {"values": [v.tolist() for v in values], "state": shown}


def entry_optimize(case: Case) -> Any:
    table, key = case.table(*map(segment_of, case.params["segments"])), id_tensor([1])
    values = []
    for gradient in case.inputs["grads"]:
        if case.inputs.get("reset_value_to_zero_before_each_step"):
            table.assign(key, torch.zeros(1, table.dim))
        table.apply_gradients(key, floats([gradient]), learning_rates=floats(case.inputs["learning_rates"]))
        values.append(table.lookup(key)[0].tolist())
    return {"values": values}


def initialize(case: Case) -> Any:
    table, key = case.table(*map(segment_of, case.params["segments"])), id_tensor([1])
    table.reinitialize(key, now=0)
    return {"value": table.lookup(key)[0]}


def fake_quant(case: Case) -> Any:
    compressor = compressor_of("fixed_r8", case.params)
    x = floats([float(v) for v in case.inputs["x"]])
    table, key = case.table(Segment(dim=len(x), compressor=compressor)), id_tensor([1])
    table.assign(key, x[None])
    return {"int8": compressor.encode(x.numpy()), "value": table.lookup(key)[0]}


def compressor_roundtrip(case: Case) -> Any:
    x = floats([float(v) for v in case.inputs["x"]])
    compressor = compressor_of(case.params["type"], case.params)
    table, key = case.table(Segment(dim=len(x), compressor=compressor), serving=True), id_tensor([1])
    table.assign(key, x[None])
    return {"x": table.lookup(key)[0]}


def hash_net(case: Case) -> Any:
    compressor = compressor_of("one_bit", case.params)
    scale, results = compressor.initial_scale, []
    for call in case.inputs["calls"]:
        if "forward" in call:
            results.append(compressor.fake_quant(np.float32([call["forward"]]), scale)[0])
        else:
            back = call["backward"]
            scale = compressor.scale_at(back["global_step"], scale)
            results.append(
                compressor.backward(np.float32([back["num"]]), np.float32([back["grad"]]), scale)[0]
            )
    return {"results": [float(result) for result in results], "scale": scale}


def stochastic_round(case: Case) -> Any:
    return {"v": round_to_half(np.float32([case.inputs["v"]]), np.float32([case.inputs["p"]]))[0]}


def stochastic_round_many(case: Case) -> Any:
    return {"v": round_to_half(np.float32(case.inputs["v"]), np.float32(case.inputs["p"]))}


def polynomial_decay(case: Case) -> Any:
    rate = PolynomialDecay(**case.params)
    return {"lr": [rate(step) for step in case.inputs["steps"]]}


# Filters and touched keys


def sliding_hash_filter(case: Case) -> Any:
    """A threshold belongs to a filter, not to a call: calls with threshold 0 go to a filter without one."""
    calls = case.inputs["calls"]
    threshold = max([call[3] for call in calls if call[0] == "filtered"], default=1)
    counting = filter_of(case.params, threshold)
    idle = filter_of(case.params, 0)
    results: list[Any] = []
    for kind, *rest in calls:
        if kind == "size":
            results.append(len(counting) + len(idle))
            continue
        key, *count = id_tensor(rest[:1]), *(torch.tensor([c]) for c in rest[1:2])
        if kind == "filtered":
            assert rest[2] in (0, threshold), "one positive threshold per vector"
            asked = counting if rest[2] else idle
            results.append(bool(asked.refuse(key, *count)[0]))
        else:
            results.append(int({"add": counting.add, "get": counting.get}[kind](key, *count)[0]))
    return {"results": results}


def intercept_gradient(case: Case) -> Any:
    ids = id_tensor(case.inputs["ids"])
    admission = filter_of(case.params, case.params.get("threshold", 0))
    grads = []
    for _ in range(case.inputs["runs"]):
        embeddings = torch.ones(len(ids), 2, requires_grad=True)
        seen = monolith.table.intercept_gradient(admission, ids, embeddings)
        seen.backward(torch.full_like(seen, case.inputs["incoming_grad"]))
        assert embeddings.grad is not None
        assert torch.equal(embeddings.grad[:, 0], embeddings.grad[:, 1])
        grads.append(embeddings.grad[:, 0].tolist())
    return {"grads": grads}


def probabilistic_filter_rate(case: Case) -> Any:
    many = 40_000
    thresholds = monolith.table.SlotThresholds(default=case.inputs["threshold"])
    rates: dict[str, list[float]] = {}
    for name, equal in (("unequal", False), ("equal", True)):
        admission = monolith.table.ProbabilisticFilter(thresholds, equal=equal, seed=1)
        rates[name] = [
            1 - float(admission.refuse(torch.arange(many), torch.full((many,), count)).float().mean())
            for count in case.inputs["counts"]
        ]
    return rates


def touched_key_set(case: Case) -> Any:
    keys = monolith.table.TouchedKeySet(**case.params)
    results: list[Any] = []
    for call in case.inputs["calls"]:
        if "steal" in call:
            results.append(sorted(keys.steal().tolist()))
        else:
            ids = id_tensor(call["insert"]) if "insert" in call else torch.arange(*call["insert_range"])
            results.append(int(keys.insert(ids)))
    return {"results": results}


# Tables


def hash_table(case: Case) -> Any:
    table = case.table(plain_segment(case.params))
    results: list[Any] = []
    for call in case.inputs["calls"]:
        name, arguments = next(iter(call.items()))
        if name == "lookup":
            results.append(table.lookup(id_tensor(arguments)))
        elif name == "size":
            results.append(len(table))
        else:
            ids, values, *time = arguments
            write = {"assign": table.assign, "assign_add": table.assign_add}.get(name)
            event_time = time[0] if time else 0
            if write is not None:
                write(id_tensor(ids), floats(values), event_time=event_time)
            else:
                dedup = {"apply_gradients": False, "apply_gradients_dedup": True}[name]
                table.apply_gradients(id_tensor(ids), floats(values), event_time=event_time, dedup=dedup)
            results.append(None)
    return {"results": results}


def hash_table_filtered(case: Case) -> Any:
    admission = filter_of(case.params, case.params["occurrence_threshold"])
    table = case.table(plain_segment(case.params), admission=admission)
    after = []
    for _ in range(case.inputs["runs"]):
        table.apply_gradients(id_tensor(case.inputs["ids"]), floats(case.inputs["grads"]))
        after.append(table.lookup(id_tensor(case.inputs["lookup"])))
    return {"after_each_run": after}


def hash_table_evict(case: Case) -> Any:
    dim = len(case.inputs["entries"][0][1])
    table = case.table(plain_segment(case.params, dim), expiry=expiry_of(case.params))
    for key, value, time in case.inputs["entries"]:
        table.assign(id_tensor([key]), floats([value]), event_time=time)
    table.evict(case.inputs["evict_at"])
    return {"values": table.lookup(id_tensor(case.inputs["lookup"]))}


def hash_table_save(case: Case) -> Any:
    name, writes = next(iter(case.inputs.items()))
    dim = len(writes[0][1])
    table, restored = (
        case.table(plain_segment(case.params, dim), expiry=expiry_of(case.params)) for _ in "ab"
    )
    for key, value, time in writes:
        getattr(table, name)(id_tensor([key]), floats([value]), event_time=time)
    ids = id_tensor([write[0] for write in writes])
    with tempfile.TemporaryDirectory() as folder:
        monolith.table.dump(table, str(Path(folder) / "table"), expire_at=table.stats().max_event_time)
        monolith.table.load(restored, str(Path(folder) / "table"))
    return {"saved_ids": ids[restored.contains(ids)], "restored_lookup": restored.lookup(ids)}


def distributed_table(case: Case) -> Any:
    ids, grads = case.inputs["apply_gradients"]
    shards = [case.table(plain_segment(case.params), name=f"ps_{i}") for i in range(case.params["num_ps"])]

    def by_shard(wanted: Tensor) -> Tensor:
        unsigned = wanted.numpy().view(np.uint64)
        return torch.from_numpy((unsigned % np.uint64(len(shards))).astype(np.int64))

    for shard, table in enumerate(shards):
        mine = by_shard(id_tensor(ids)) == shard
        table.apply_gradients(id_tensor(ids)[mine], floats(grads)[mine], dedup=True)
    wanted = id_tensor(case.inputs["lookup"])
    values = torch.empty(len(wanted), shards[0].dim)
    for shard, table in enumerate(shards):
        values[by_shard(wanted) == shard] = table.lookup(wanted[by_shard(wanted) == shard])
    return {"values": values}


# Several tables


def _multi_table(case: Case) -> Any:
    dims = case.inputs.get("table_dims") or [len(next(iter(t.values()))) for t in case.inputs["tables"]]
    tables = {}
    for number, (dim, entries) in enumerate(zip(dims, case.inputs["tables"], strict=True)):
        table = case.table(plain_segment(case.params, dim), name=f"table{number}")
        if entries:
            table.assign(id_tensor(entries), floats(list(entries.values())))
        tables[f"table{number}"] = table
    return monolith.table.MultiTable(tables)


def fused_lookup(case: Case) -> Any:
    found = _multi_table(case).fused_lookup(
        id_tensor(case.inputs["ids"]),
        torch.tensor(case.inputs["fused_slot_size"]),
        num_batches=case.params["num_of_shards"],
    )
    names = ("embeddings", "recv_splits", "id_offsets", "emb_offsets")
    return {name: getattr(found, name) for name in names}


def fused_apply_gradient(case: Case) -> Any:
    tables, inputs = _multi_table(case), case.inputs
    ids, sizes = id_tensor(inputs["ids"]), torch.tensor(inputs["fused_slot_size"])
    shards = case.params["num_of_shards"]
    tables.fused_apply_gradients(
        ids,
        sizes,
        floats(inputs["grads"]),
        num_batches=shards,
        learning_rates=floats(inputs["learning_rates"]),
    )
    return {"lookup_after": tables.fused_lookup(ids, sizes, num_batches=shards).embeddings}


def multi_table_reinitialize(case: Case) -> Any:
    inputs = case.inputs
    table = case.table(plain_segment(case.params), name=inputs["table"])
    present, ids = id_tensor(inputs["present_ids"]), id_tensor(inputs["ids"])
    table.assign(present, torch.ones(len(present), table.dim))
    tables = monolith.table.MultiTable({inputs["table"]: table})
    return {
        "status_known": tables.reinitialize(inputs["table"], ids, now=0),
        "values_after": table.lookup(ids),
        "status_unknown_table": tables.reinitialize(inputs["unknown_table"], ids, now=0),
    }


def merged_table_name(case: Case) -> Any:
    slots = case.inputs["slots"]
    return {"name": merged_name(slots), "extra_restore_names": list(legacy_names(slots))}


# Files


def sharded_file_names(case: Case) -> Any:
    names = monolith.table.sharded_names(case.inputs["basename"], case.inputs["nshards"])
    return {"names": list(names)}


def validate_sharded_files(case: Case) -> Any:
    def accepts(basename: str, names: list[str]) -> bool:
        try:
            monolith.table.validate_sharded(basename, names)
        except ValueError:
            return False
        return True

    return {"ok": [accepts(basename, names) for basename, names in case.inputs["cases"]]}


def entry_dump_bytes(case: Case) -> Any:
    """Serialize one row as upstream does: `num` values and one optimizer dump per segment."""
    inputs = case.inputs
    table = case.table(*(Segment(dim=1, optimizer=optimizer_of(opt)) for opt in inputs["opt"]))
    table.assign(id_tensor([inputs["id"]]), floats([inputs["num"]]), event_time=inputs["last_update_ts_sec"])
    _, row = table.lookup_rows(id_tensor([inputs["id"]]))
    (payload,) = monolith.table.encode_entry_dumps(row, table.config)
    return {"hex": payload.hex()}


def tfrecord_bytes(case: Case) -> Any:
    payload = bytes.fromhex(case.inputs["payload_hex"])
    return {"hex": monolith.table.tfrecord(payload).hex()}


def masked_crc32c(case: Case) -> Any:
    payload = bytes.fromhex(case.inputs["payload_hex"])
    return {
        "crc32c": monolith.native.crc32c(payload),
        "masked": monolith.native.masked_crc32c(payload),
    }


OPS: dict[str, Callable[[Case], Any]] = {
    "sparse_optimizer": sparse_optimizer,
    "entry_optimize": entry_optimize,
    "initialize": initialize,
    "fake_quant": fake_quant,
    "compressor_roundtrip": compressor_roundtrip,
    "hash_net": hash_net,
    "stochastic_round": stochastic_round,
    "stochastic_round_many": stochastic_round_many,
    "polynomial_decay": polynomial_decay,
    "sliding_hash_filter": sliding_hash_filter,
    "intercept_gradient": intercept_gradient,
    "probabilistic_filter_rate": probabilistic_filter_rate,
    "touched_key_set": touched_key_set,
    "hash_table": hash_table,
    "hash_table_filtered": hash_table_filtered,
    "hash_table_evict": hash_table_evict,
    "hash_table_save": hash_table_save,
    "distributed_table": distributed_table,
    "fused_lookup": fused_lookup,
    "fused_apply_gradient": fused_apply_gradient,
    "multi_table_reinitialize": multi_table_reinitialize,
    "merged_table_name": merged_table_name,
    "sharded_file_names": sharded_file_names,
    "validate_sharded_files": validate_sharded_files,
    "entry_dump_bytes": entry_dump_bytes,
    "tfrecord_bytes": tfrecord_bytes,
    "masked_crc32c": masked_crc32c,
}

TABLE_OPS = {
    "sparse_optimizer",
    "entry_optimize",
    "initialize",
    "fake_quant",
    "compressor_roundtrip",
    "hash_table",
    "hash_table_filtered",
    "hash_table_evict",
    "hash_table_save",
    "distributed_table",
    "fused_lookup",
    "fused_apply_gradient",
    "multi_table_reinitialize",
    "entry_dump_bytes",
}
"""Ops that run on every implementation of the table seam."""
