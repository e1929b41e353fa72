"""Rank keys: the key-value store by which the ranks of a run find each other, signed with the run's token.

Ranks use a `torch.distributed.TCPStore`, which rank 0 or torchrun serves. It has neither tokens nor TLS:
every program that reaches its port may read, write and delete keys. So ranks sign each value:

    stored under a key = HMAC-SHA256(token; attempt, key, value) + value

A value without the right signature is never parsed. gloo and NCCL find their own connections by these keys,
so their addresses are signed, too. A program that reaches the port can still delete keys, and so prevent
ranks from starting, or replay a value of the same key and attempt, which changes nothing.

Every attempt to train has keys of its own, with a random name that is part of each signature:

    attempt      the name of the attempt, signed for no attempt in particular
    process/2    the process that is rank 2
    calls/2      where rank 2 answers calls; see `RankCalls`
    failed       why the first rank that failed did
    said/KEY     a note of one rank for the other ranks
    lookups/...  of a group, by gloo or NCCL
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch import distributed as dist

from monolith import concurrency
from monolith.config import Secret
from monolith.errors import FailedPeerError, UnavailableError
from monolith.store.rank_network import REACH_WITHIN, Keys, rank_network

_log = logging.getLogger(__name__)

REPLACED = "its process was lost, and has restarted"
"""Why an attempt ends in which a second process joins as a rank."""
ATTEMPT = "attempt"
FAILED = "failed"
POLL_EVERY = 0.02
"""Seconds between two polls for a key."""
_DOMAIN = b"monolith rank keys 1"
_SIGNATURE_BYTES = 32


class RankKeys(dist.Store):  # type: ignore[misc, name-defined]
    """Signed keys of one attempt: a `torch.distributed.Store`, also for gloo and NCCL. Thread-safe.

    torch calls it through C++ and has no reference to the Python object, so the code that makes a group with
    it must keep a reference for as long as the group.

        keys = keep_keys("127.0.0.1", token)                        # rank 0
        keys = join_attempt(reach_keys("127.0.0.1", port), token)   # other ranks
        keys.set("said/hello", "1")

    Args:
        inner: The keys without signatures.
        token: Shared by all ranks.
        attempt: Part of every signature, so that no value of an earlier attempt is taken for one of this.
    """

    def __init__(self, inner: Keys, token: Secret, attempt: str) -> None:
        super().__init__()
        self._inner = inner
        self._secret = token.reveal().encode()
        self.attempt = attempt
        self._reported: set[str] = set()

    @property
    def port(self) -> int:
        """The port of the process that serves the keys."""
        return int(self._inner.port)

    # What torch calls; names and arguments are those of its Store.

    def set(self, key: str, value: str | bytes) -> None:
        with _reached():
            self._inner.set(key, self._signed(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Return the value of a key, as soon as there is one.

        Raises:
            UnavailableError: There is none in time, its signature is wrong, or another rank has failed.
        """
        self.wait([key])
        with _reached():
            found = self._opened(key, self._inner.get(key))
        if found is None:
            raise UnavailableError(self._forged(key))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        with _reached():
            return bool(self._inner.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta = REACH_WITHIN) -> None:
        # Not the wait of the store itself, which ignores reported failures: a rank that leaves before all are
        # connected would block the other ranks for as long as `timeouts.silence`.
        deadline = concurrency.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if (failure := self.failure()) is not None:
                raise failure
            if concurrency.monotonic() >= deadline:
                missing = [key for key in keys if not self.check([key])]
                raise UnavailableError(
                    f"no rank has written the key {', '.join(missing)!r} within {timeout.total_seconds():g} s"
                )
            concurrency.sleep(POLL_EVERY)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value if the key has the expected one, or "" for none; return the value it then has.

        A value with a wrong signature counts as none.
        """
        signed = self._signed(key, _bytes(desired))
        known = self._signed(key, _bytes(expected)) if expected else b""
        with _reached():
            found = self._inner.compare_set(key, known, signed)
            if self._opened(key, found) is None:
                self._report(key)
                found = self._inner.compare_set(key, found, signed)
        value = self._opened(key, found)
        if value is None:
            raise UnavailableError(self._forged(key))
        return value

    def delete_key(self, key: str) -> bool:
        with _reached():
            return bool(self._inner.delete_key(key))

    def has_extended_api(self) -> bool:
        return False

    # What ranks tell each other

    def peek(self, key: str) -> bytes | None:
        """Return the value that a key has now; None if it has none, or one with a wrong signature."""
        with _reached():
            if not self._inner.check([key]):
                return None
            found = self._opened(key, self._inner.get(key))
        if found is None:
            self._report(key)
        return found

    def fail(self, rank: int, text: str) -> None:
        """Tell all ranks why this one cannot continue. Only the first report counts. It never raises."""
        with contextlib.suppress(UnavailableError):
            self.compare_set(FAILED, "", json.dumps([rank, text]))

    def failure(self) -> FailedPeerError | None:
        """Return why the first rank that failed did; None if none has."""
        said = self.peek(FAILED)
        if said is None:
            return None
        rank, text = json.loads(said)
        error = FailedPeerError(f"rank {rank} cannot continue: {text}")
        error.replaced = rank if text == REPLACED else None
        return error

    # Signatures

    def _signed(self, key: str, value: bytes) -> bytes:
        return self._signature(key, value) + value

    def _signature(self, key: str, value: bytes) -> bytes:
        parts = (_DOMAIN, self.attempt.encode(), key.encode(), value)
        # Each with its length before it: no two lists of parts are the same bytes.
        return hmac.digest(self._secret, b"".join(len(one).to_bytes(8) + one for one in parts), "sha256")

    def _opened(self, key: str, stored: bytes) -> bytes | None:
        """Return the value of what is stored under a key; None if its signature is wrong."""
        signature, value = stored[:_SIGNATURE_BYTES], stored[_SIGNATURE_BYTES:]
        return value if hmac.compare_digest(signature, self._signature(key, value)) else None

    def _forged(self, key: str) -> str:
        return (
            f"refused the key {key!r} that ranks share: its value was not signed with the token of this run. "
            "Another program wrote it, or the rank that wrote it has another token: give all ranks the same "
            "security.token_file, and check which other programs can reach the address of rank 0"
        )

    def _report(self, key: str) -> None:
        if key not in self._reported:  # a stranger must not fill the log
            self._reported.add(key)
            _log.warning("%s", self._forged(key))


def keep_keys(host: str, token: Secret, port: int = 0) -> RankKeys:
    """Return the keys of a new attempt, served by this process at `host` alone.

    Args:
        port: 0 lets the system choose.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """
    with _reached():
        keys = rank_network().serve_keys(host, port)
    return begin_attempt(keys, token)


def reach_keys(host: str, port: int) -> Keys:
    """Return the keys, without signatures, that another process serves.

    Raises:
        UnavailableError: No process serves them at this address.
    """
    with _reached():
        return rank_network().reach_keys(host, port)


def begin_attempt(inner: Keys, token: Secret) -> RankKeys:
    """Name a new attempt; return its keys. Rank 0 does this."""
    attempt = concurrency.token_hex(8)
    RankKeys(inner, token, "").set(ATTEMPT, attempt)
    return RankKeys(inner, token, attempt)


def join_attempt(inner: Keys, token: Secret) -> RankKeys:
    """Return the keys of the attempt that rank 0 has named.

    Raises:
        UnavailableError: It has named none yet, or has another token.
    """
    return RankKeys(inner, token, RankKeys(inner, token, "").get(ATTEMPT).decode())


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Translate errors of the connection to the keys."""
    try:
        yield
    except RuntimeError as cause:
        raise UnavailableError(f"the process that serves the keys of all ranks is gone: {cause}") from cause
