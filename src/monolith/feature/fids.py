"""Feature ids: which feature an id belongs to, and which of its values it is.

A fid is 64 bits: a slot, which identifies a kind of feature, and a signature, which
identifies a value. Version 1 has 10 bits of slot and 54 of signature; version 2 has a
zero bit, 15 of slot and 48 of signature. Everything after parsing works on version 2.

Fids are int64. Those of version 1 from slot 512 on have their highest bit set and are
negative. The functions take a Python int, signed or unsigned, or an int64 tensor, and
answer in kind: an int in the range of int64, or a tensor.

Strings and numbers become signatures by the core's hash: the same in every process, on
every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.errors import FeatureError

Fids = TypeVar("Fids", int, Tensor)

MAX_SLOTS_V1 = 1 << 10
MAX_SLOTS_V2 = 1 << 15
SIGNATURE_BITS = {1: 54, 2: 48}
_MAX_SLOTS = {1: MAX_SLOTS_V1, 2: MAX_SLOTS_V2}


def make_fid(slot: int, signature: Fids, version: int = 2) -> Fids:
    """Return the fid of a signature, of which only the bits that fit are kept."""
    _check(slot, version)
    bits = SIGNATURE_BITS[version]
    return _signed(slot << bits) | _bits(signature, (1 << bits) - 1)


def slot_of(fid: Fids, version: int = 2) -> Fids:
    """Return the slot; of version 2 the highest bit, which should be zero, does not matter."""
    _check(0, version)
    return _bits(fid >> SIGNATURE_BITS[version], _MAX_SLOTS[version] - 1)


def signature_of(fid: Fids, version: int = 2) -> Fids:
    """Return the signature."""
    _check(0, version)
    return _bits(fid, (1 << SIGNATURE_BITS[version]) - 1)


def convert_v1_to_v2(fid: Fids) -> Fids:
    """Keep the slot and the low 48 bits of the signature; the other six are lost."""
    low = _bits(fid, (1 << SIGNATURE_BITS[2]) - 1)
    return low | slot_of(fid, 1) << SIGNATURE_BITS[2]


def switch_slot(fid: Fids, slot: int, version: int = 2) -> Fids:
    """Return the same signature in another slot."""
    return make_fid(slot, signature_of(fid, version), version)


def check_fid_v2(fid: int) -> int:
    """Return the fid, or raise if its highest bit, which version 2 keeps at zero, is set."""
    if not 0 <= fid < 1 << 63:
        raise FeatureError(f"a fid of version 2 has a zero in its highest bit, got {fid:#x}")
    return fid


def describe(fid: int, version: int = 2) -> str:
    """Return for example `281474976710756(v2|slot=1|sig=100)`."""
    unsigned = fid & (1 << 64) - 1
    return f"{unsigned}(v{version}|slot={slot_of(fid, version)}|sig={signature_of(fid, version)})"


def hash_strings(texts: Sequence[str | bytes], slot: int | None = None, version: int = 2) -> Tensor:
    """Return one id per string, int64 of shape (n,); a str is taken as its UTF-8.

    The same id that a feature spec gives the string, so that a row can be found by its word.
    For whole columns a `FeatureSpec` is much faster: it makes no Python object of a string.

    Args:
        slot: Makes fids of that slot, with 48 bits of the hash in version 2; None leaves all 64 bits.
    """
    if slot is not None:
        _check(slot, version)
    pieces = [text.encode() if isinstance(text, str) else text for text in texts]
    splits = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return torch.from_numpy(native.hash_strings(b"".join(pieces), splits, slot, version))


def hash_floats(values: Tensor, slot: int, version: int = 2) -> Tensor:
    """Return one fid per number, in the shape of `values`; equal numbers have equal fids, NaNs too."""
    _check(slot, version)
    numbers = values.detach().to("cpu", torch.float32).contiguous()
    return torch.from_numpy(native.hash_floats(numbers.view(-1).numpy(), slot, version)).view(values.shape)


def hash_integers(values: Tensor, slot: int, version: int = 2) -> Tensor:
    """Return one fid per integer, in the shape of `values`.

    For raw ids that may need more bits than a signature has. Those that fit keep their
    value, and never meet another, with `make_fid`.
    """
    _check(slot, version)
    numbers = values.detach().to("cpu", torch.int64).contiguous()
    return torch.from_numpy(native.hash_integers(numbers.view(-1).numpy(), slot, version)).view(values.shape)


def _check(slot: int, version: int) -> None:
    if version not in SIGNATURE_BITS:
        raise FeatureError(f"a fid is of version 1 or 2, got {version!r}")
    if not 0 <= slot < _MAX_SLOTS[version]:
        raise FeatureError(f"slot should be less than {_MAX_SLOTS[version]}, while got {slot}")


def _bits(number: Fids, mask: int) -> Fids:
    return number & mask


def _signed(number: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    return number - (1 << 64) if number >> 63 else number
