from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import ConfigError
from monolith.table import COMPRESSORS, FixedR8, Fp16, Fp32, OneBit
from monolith.table.compressors import LARGEST_HALF, round_to_half

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
CHANCES = st.integers(0, 2**24 - 1).map(lambda n: n / 2**24)


def test_the_table_of_compressors_is_named_by_kind_and_tells_sizes() -> None:
    assert {kind: cls.kind for kind, cls in COMPRESSORS.items()} == {kind: kind for kind in COMPRESSORS}
    sizes = {kind: cls.bytes_per_value for kind, cls in COMPRESSORS.items()}
    assert sizes == {"fp32": 4, "fp16": 2, "fixed_r8": 1, "one_bit": 1}


@pytest.mark.parametrize("compressor", [Fp32(), Fp16(), FixedR8(5.0), OneBit()], ids=str)
def test_a_code_takes_the_bytes_it_says_and_decoding_is_stable(compressor: Fp32) -> None:
    values = np.linspace(-6, 6, 101, dtype=np.float32)
    codes = compressor.encode(values)
    assert codes.dtype.itemsize == compressor.bytes_per_value
    decoded = compressor.decode(codes)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(compressor.decode(compressor.encode(decoded)), decoded)


def test_fixed_r8_rounds_halves_away_from_zero() -> None:
    codes = FixedR8(128.0).encode(np.float32([0.5, -0.5, 0.49, -0.49, 1.5, -1.5, 0.0, -0.0]))
    assert codes.tolist() == [1, -1, 0, 0, 2, -2, 0, 0]


def test_fixed_r8_saturates_before_it_makes_integers_and_reads_nan_as_zero() -> None:
    extremes = np.float32([np.inf, -np.inf, 3e38, -3e38, np.nan])
    assert FixedR8(5.0).encode(extremes).tolist() == [127, -128, 127, -128, 0]


def test_training_sees_what_a_server_will_answer_with_fixed_r8() -> None:
    values, compressor = np.float32([0.3, -2.0]), FixedR8()
    assert compressor.fake_quant(values).tolist() == [0.296875, -1.0]
    gradients = np.float32([1.0, 2.0])
    assert compressor.backward(values, gradients).tolist() == [1.0, 2.0]


def test_plain_compressors_do_not_show_in_training() -> None:
    values = np.float32([0.1])
    assert Fp16().fake_quant(values).tolist() == values.tolist()
    assert Fp32().fake_quant(values).tolist() == values.tolist()


def test_fp16_goes_to_infinity_without_a_warning() -> None:
    with np.errstate(all="raise"):
        assert Fp16().decode(Fp16().encode(np.float32([1e6]))).tolist() == [np.inf]


def test_one_bit_keeps_a_sign_and_zero_is_negative() -> None:
    codes = OneBit(amplitude=0.25).encode(np.float32([2, 1e-30, 0.0, -0.0, -2]))
    assert codes.tolist() == [1, 1, -1, -1, -1]
    assert OneBit(amplitude=0.25).decode(codes).tolist() == [0.25, 0.25, -0.25, -0.25, -0.25]


def test_one_bit_moves_its_scale_on_when_the_step_size_divides_the_step() -> None:
    compressor = OneBit(step_size=100, init_scale=2.0, max_scale=3.0)
    assert compressor.initial_scale == 2.0
    assert compressor.scale_at(99, 2.0) == 2.0
    assert compressor.scale_at(100, 2.0) == pytest.approx(2 * 1.5**0.5)
    assert compressor.scale_at(1000, 2.0) == 3.0


def test_one_bit_gradient_is_that_of_its_tanh_and_leaves_the_callers_alone() -> None:
    compressor, x, ones = OneBit(amplitude=0.5), np.float32([0.3]), np.float32([1.0])
    step = np.float32(1e-3)
    rise = compressor.fake_quant(x + step, 1.7) - compressor.fake_quant(x - step, 1.7)
    np.testing.assert_allclose(compressor.backward(x, ones, 1.7), rise / (2 * step), rtol=1e-3)
    assert ones.tolist() == [1.0]


def test_what_cannot_be_is_refused() -> None:
    for broken in (
        lambda: FixedR8(0.0),
        lambda: FixedR8(float("inf")),
        lambda: OneBit(step_size=0),
        lambda: OneBit(init_scale=0.0),
        lambda: OneBit(max_scale=-1.0),
        lambda: OneBit(amplitude=0.0),
    ):
        with pytest.raises(ConfigError):
            broken()


# Stochastic rounding


@given(FLOATS, CHANCES)
def test_rounding_gives_a_neighbouring_half(value: float, chance: float) -> None:
    (rounded,) = round_to_half(np.float32([value]), np.float32([chance]))
    assert np.float16(rounded) == rounded
    if abs(value) <= LARGEST_HALF:
        with np.errstate(over="ignore"):
            ulp = float(np.spacing(np.float16(abs(rounded))))
        assert abs(float(rounded) - value) <= ulp
    else:
        assert abs(rounded) == LARGEST_HALF


@given(st.floats(width=16))
def test_a_half_is_left_alone(value: float) -> None:
    for chance in (0.0, 0.999):
        np.testing.assert_array_equal(
            round_to_half(np.float32([value]), np.float32([chance])), [np.float32(value)]
        )


def test_rounding_is_right_on_average() -> None:
    rng = np.random.default_rng(0)
    for value in (0.1, -0.1, 1e-6, -3e-8, 1000.3):
        values = np.full(100_000, value, np.float32)
        mean = round_to_half(values, rng.random(100_000, dtype=np.float32)).mean(dtype=np.float64)
        assert abs(mean - value) < 0.01 * float(np.spacing(np.float16(abs(value))))
