"""Makes the TensorFlow checkpoints next to it, and checks that TensorFlow reads the ones we export.

Needs TensorFlow, which the project does not: run it with the Python of another environment.

    python tensorflow_checkpoints.py make data          # writes the folders of data/
    python tensorflow_checkpoints.py read PREFIX        # prints what TensorFlow finds in a checkpoint
    python tensorflow_checkpoints.py records FILE       # counts the records of a multi-table dump
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import _pywrap_record_io

V1 = tf.compat.v1


def small(*shape: int) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) / 8


def dtypes(folder: str) -> None:
    """One variable of each kind, and a text, as `tf.train.Checkpoint` names them."""
    kinds = {
        "float": tf.Variable(small(2, 3)),
        "double": tf.Variable(small(2), dtype=tf.float64),
        "half": tf.Variable(small(3), dtype=tf.float16),
        "bfloat": tf.Variable(small(3), dtype=tf.bfloat16),
        "int": tf.Variable([-3, 4], dtype=tf.int32),
        "long": tf.Variable(1 << 40, dtype=tf.int64),
        "flag": tf.Variable([True, False]),
        "text": tf.Variable("hello"),
        "empty": tf.Variable(np.zeros((0, 3), np.float32)),
    }
    tf.train.Checkpoint(**kinds).write(f"{folder}/model.ckpt-7")


def partitioned(folder: str) -> None:
    """A tower whose first kernel is in three parts, trained with Adam for two steps and saved by a Saver."""
    with V1.Graph().as_default():
        V1.train.get_or_create_global_step()
        cut = V1.fixed_size_partitioner(3)
        kernel = V1.get_variable("dense/kernel", (100, 2), partitioner=cut)
        bias = V1.get_variable("dense/bias", initializer=small(2))
        top = V1.get_variable("top/kernel", initializer=small(2, 1))
        across = V1.fixed_size_partitioner(2, axis=1)
        wide = V1.get_variable("wide", (70, 2), partitioner=across)
        firsts = [part.assign(small(*part.shape)) for part in [*kernel, *wide]]
        x = tf.constant(np.ones((4, 100), np.float32))
        out = tf.matmul(tf.matmul(x, kernel) + bias, top)
        loss = tf.reduce_mean(tf.square(out)) + tf.reduce_sum(tf.convert_to_tensor(wide))
        step = V1.train.AdamOptimizer(0.01).minimize(loss, global_step=V1.train.get_global_step())
        with V1.Session() as session:
            session.run(V1.global_variables_initializer())
            session.run(firsts)
            for _ in range(2):
                session.run(step)
            saver = V1.train.Saver(sharded=True)
            saver.save(session, f"{folder}/model.ckpt", global_step=2, write_meta_graph=False)


def several_files(folder: str) -> None:
    """Variables in two data files, as parameter servers write them."""
    a, b = tf.Variable(small(2, 2)), tf.Variable(small(3))
    prefixes = []
    for number, (name, value) in enumerate({"tower/a": a, "tower/b": b}.items()):
        prefixes.append(f"{folder}/part-{number}")
        tf.raw_ops.SaveV2(
            prefix=prefixes[-1], tensor_names=[name], shape_and_slices=[""], tensors=[value.read_value()]
        )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=prefixes, destination_prefix=f"{folder}/model.ckpt-9", delete_old_dirs=False
    )


def snappy_records(folder: str) -> None:
    """Records in a snappy stream, as the original's multi-table dumps have them."""
    options = _pywrap_record_io.RecordWriterOptions("SNAPPY")
    writer = _pywrap_record_io.RecordWriter(f"{folder}/records.snappy", options)
    for number in range(40):
        writer.write(b"record %d " % number * 20)
    writer.close()


MADE = {one.__name__: one for one in (dtypes, partitioned, several_files, snappy_records)}


def make(where: str) -> None:
    for name, write in MADE.items():
        folder = pathlib.Path(where, name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(str(folder))
    for path in sorted(pathlib.Path(where).rglob("*")):
        if path.name.startswith(("checkpoint", "part-")):
            path.unlink()
        elif path.suffix == ".index":
            found = json.dumps(values(str(path.with_suffix(""))))
            path.with_name("expected.json").write_text(found.replace("}, ", "},\n ") + "\n")


def values(prefix: str) -> dict[str, dict[str, object]]:
    """Return what TensorFlow's own reader finds: of each variable the sum, and the first and last number."""
    reader = tf.train.load_checkpoint(prefix)
    found: dict[str, dict[str, object]] = {}
    for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        value = reader.get_tensor(name)
        found[name] = {"dtype": dtype.name, "shape": list(np.shape(value))}
        if dtype != tf.string:
            numbers = np.asarray(value, np.float64).ravel()
            found[name] |= {"sum": numbers.sum(), "ends": [*numbers[:1], *numbers[-1:]]}
    return found


def read(prefix: str) -> None:
    sys.stdout.write(json.dumps(values(prefix), indent=1) + "\n")


def records(path: str) -> None:
    """Print how many records TensorFlow finds in a snappy stream."""
    sys.stdout.write(f"{sum(1 for _ in _pywrap_record_io.RecordIterator(path, 'SNAPPY'))}\n")


if __name__ == "__main__":
    {"make": make, "read": read, "records": records}[sys.argv[1]](*sys.argv[2:])
