from __future__ import annotations

import json
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import RestoreError, SaveError
from monolith.tensors.plain_state import decode, encode


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, "it", tensors), allow_nan=False)), tensors)


keys = st.one_of(st.integers(), st.text(), st.booleans(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(st.text(), inner),
        st.dictionaries(keys, inner),
    ),
)


@given(values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert there_and_back(value) == value
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        float("inf"),
        -float("inf"),
        0.1 + 0.2,
        5e-324,
        2**100,
        {"$tensor": "not a tensor"},
        {"$": {"$tuple": ()}},
        {1: "a", "1": "b"},
        Counter({2: 1, 4: 3}),
        torch.bfloat16,
    ],
)
def test_what_json_has_no_word_for_comes_back(value: Any) -> None:
    assert there_and_back(value) == value
    assert type(there_and_back(value)) is type(value)


def test_not_a_number_stays_none() -> None:
    found = there_and_back(float("nan"))
    assert found != found  # noqa: PLR0124


def test_tensors_and_arrays_are_put_aside_under_names() -> None:
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode({"a": [torch.ones(2)], "b": np.arange(3, dtype=np.uint32)}, "it", tensors)
    assert encoded == {"a": [{"$tensor": "it/a/0"}], "b": {"$array": "it/b"}}
    found = decode(encoded, tensors)
    assert found["a"][0].tolist() == [1.0, 1.0]
    assert found["b"].dtype == np.uint32
    assert isinstance(found["b"], np.ndarray)


def test_two_tensors_never_get_one_name() -> None:
    value = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1), 1: torch.ones(3), "1": torch.ones(4)}
    found = there_and_back(value)
    assert {key: value[key].shape for key in ("a/b", 1, "1")} == {k: found[k].shape for k in ("a/b", 1, "1")}
    assert (found["a"]["b"].item(), found["a/b"].item()) == (1.0, 0.0)


def test_numpy_numbers_become_numbers_and_ordered_dicts_dicts() -> None:
    assert there_and_back([np.float64(0.5), np.int32(7), OrderedDict(a=1)]) == [0.5, 7, {"a": 1}]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", namedtuple("P", "x")(1), len, 1j])
def test_what_would_need_a_pickle_is_refused_by_name(value: Any) -> None:
    with pytest.raises(SaveError, match=r"cannot save it/deep/0: it is a .*no pickles"):
        encode({"deep": [value]}, "it", {})


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": "missing"},
        {"$tensor": []},
        {"$float": "many"},
        {"$dtype": "nn"},
        {"$dtype": "no_such"},
        {"$dict": [1]},
        {"$dict": [[[], 1]]},
        {"$new": 1},
    ],
)
def test_an_unknown_type_is_refused(value: Any) -> None:
    with pytest.raises(RestoreError, match=r"the saved state has \$"):
        decode({"a": [value]}, {})


def test_a_text_that_is_too_long_for_json_is_a_tensor_of_its_bytes() -> None:
    value = {"short": "ab", "texts": ["abc", "äöü", 1], "long": "abcd"}
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(value, "it", tensors, longest_text=2)
    assert encoded["short"] == "ab"
    assert set(tensors) == {"it/texts/0", "it/texts/1", "it/long"}
    assert decode(json.loads(json.dumps(encoded)), tensors) == value
