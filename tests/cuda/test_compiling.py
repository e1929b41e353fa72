"""Every kernel compiles for the GPUs of today, on machines without one: NVRTC needs none.

`MONOLITH_NVRTC` names the library, such as libnvrtc.so.13; without it the package nvidia-cuda-nvrtc
is looked for, which CUDA builds of torch bring.
"""

from __future__ import annotations

import os
import site
from pathlib import Path
from typing import Any

import pytest

import monolith
from monolith.cuda import KernelCompiler
from monolith.cuda.kernels import load_nvrtc
from monolith.cuda.verdict import verdict_source
from monolith.errors import AcceleratorError
from monolith.feature.cuda.device_plan import layout_source
from monolith.feature.cuda.repeating import repeated_source
from monolith.table import (
    OPTIMIZERS,
    Adagrad,
    Adam,
    DelayCompensated,
    FixedR8,
    Fp16,
    OneBit,
    RandomUniform,
    Segment,
    StochasticRounding,
    TableConfig,
)
from monolith.table.cuda.layout import (
    KernelProgram,
    admission_kernels,
    fused_index_kernels,
    index_kernels,
    row_layout,
)


def all_optimizers() -> tuple[Segment, ...]:
    """Return a segment for each, so that one source has them all."""
    return tuple(
        Segment(dim=1 if kind == "batch_softmax" else 40, optimizer=make(), initializer=RandomUniform())
        for kind, make in OPTIMIZERS.items()
    )


TABLES = {
    "plain": (Segment(dim=64, optimizer=Adagrad(), initializer=RandomUniform()),),
    "wide": (Segment(dim=128, optimizer=Adam()), Segment(dim=300, optimizer=Adam())),
    "narrow": (Segment(dim=1),),
    "all optimizers": all_optimizers(),
    "all views": (
        Segment(dim=8, compressor=Fp16(), optimizer=StochasticRounding(Adagrad())),
        Segment(dim=8, compressor=FixedR8(), optimizer=DelayCompensated(Adagrad(), 0.5)),
        Segment(dim=3, compressor=OneBit()),
    ),
}


def programs() -> dict[str, KernelProgram]:
    """Return every program of the package, those that are made for a table as some tables need them."""
    layouts = {
        name: row_layout(TableConfig(name="t", segments=segments)) for name, segments in TABLES.items()
    }
    for rounding in ("nearest", "stochastic"):
        for name in ("plain", "narrow", "all optimizers"):
            how: Any = {"embedding_dtype": "bfloat16", "embedding_rounding": rounding}
            layouts[f"{name}, {rounding} bfloat16"] = row_layout(
                TableConfig(name="t", segments=TABLES[name], **how)
            )
    serving = row_layout(TableConfig(name="t", segments=TABLES["all views"], serving=True))
    fused = {"plain": layouts["plain"], "all views": layouts["all views"], "serving": serving}
    return {
        "layouts": KernelProgram("layouts", layout_source(3), ()),
        "repeated": KernelProgram("repeated", repeated_source(), ()),
        "verdict": KernelProgram("verdict", verdict_source(), ()),
        "index": index_kernels(),
        **{f"rows, {name}": layout.rows for name, layout in layouts.items()},
        "rows, serving": serving.rows,
        "indices of many tables": fused_index_kernels(),
        "admission filters": admission_kernels(),
        **{f"rows of many tables, {name}": layout.fused_rows for name, layout in fused.items()},
    }


@pytest.fixture(scope="module")
def compiler() -> KernelCompiler:
    named = os.environ.get("MONOLITH_NVRTC")
    packages = [Path(folder) for folder in site.getsitepackages()]
    places = (
        [named] if named else [p for folder in packages for p in folder.glob("nvidia/*/lib/libnvrtc.so.*")]
    )
    if not places:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc, or MONOLITH_NVRTC=/path/to/libnvrtc.so.13")
    return KernelCompiler(load_nvrtc(Path(places[0])))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", programs())
def test_it_compiles(compiler: KernelCompiler, name: str, architecture: str) -> None:
    program = programs()[name]
    image = compiler.compile(program.source, f"{program.name}.cu", architecture, program.headers)
    assert image.startswith(b"\x7fELF")


def test_what_does_not_compile_is_shown(compiler: KernelCompiler) -> None:
    with pytest.raises(AcceleratorError, match=r"broken\.cu does not compile:\s+broken\.cu\(2\)"):
        compiler.compile("\nint x = y;", "broken.cu", "sm_90")


def test_no_source_is_forgotten() -> None:
    texts = [text for one in programs().values() for text in (one.source, *dict(one.headers).values())]
    everything = "".join(texts)
    for path in Path(monolith.__path__[-1]).rglob("*.cu*"):
        if path.suffix in (".cu", ".cuh"):
            assert path.read_text("utf-8").partition("\n")[0] in everything, path
