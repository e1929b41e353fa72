"""Keys that ranks share: a value counts only with the signature of the run's token."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from store.listeners import listening
from store.ranks import TOKEN, connected
from torch import distributed as dist

from monolith.config import Secret
from monolith.errors import FailedPeerError, ListenError, UnavailableError
from monolith.store.rank_keys import FAILED, RankKeys, begin_attempt, join_attempt, keep_keys, reach_keys

FORGED = b'[1, "give up"]'


@pytest.fixture
def raw() -> Any:
    """What a program sees that reaches the keys and has no token."""
    return dist.HashStore()


@pytest.fixture
def keys(raw: Any) -> RankKeys:
    return begin_attempt(raw, TOKEN)


def test_ranks_read_what_another_wrote(keys: RankKeys, raw: Any) -> None:
    keys.set("process/0", "abc")
    other = join_attempt(raw, TOKEN)
    assert other.attempt == keys.attempt
    assert other.get("process/0") == b"abc"


def test_a_value_without_the_signature_is_an_error_that_names_the_key(keys: RankKeys, raw: Any) -> None:
    for forged in (b"", b"127.0.0.9:80", b"x" * 32, b"x" * 1000):
        raw.set("calls/1", forged)
        with pytest.raises(UnavailableError, match=r"refused the key 'calls/1'.*not signed with the token"):
            keys.get("calls/1")


def test_a_rank_with_another_token_is_told_which_setting_to_look_at(keys: RankKeys, raw: Any) -> None:
    assert keys.attempt
    with pytest.raises(UnavailableError, match=r"'attempt'.*security.token_file"):
        join_attempt(raw, Secret("another"))


def test_a_value_counts_for_its_key_and_its_attempt_alone(keys: RankKeys, raw: Any) -> None:
    keys.set("process/0", "abc")
    raw.set("process/1", raw.get("process/0"))
    with pytest.raises(UnavailableError, match="process/1"):
        keys.get("process/1")
    later = begin_attempt(raw, TOKEN)
    with pytest.raises(UnavailableError, match="process/0"):
        later.get("process/0")


def test_a_forged_note_or_failure_counts_as_none_and_is_logged_once(
    keys: RankKeys, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for key in (FAILED, "said/begun"):
        raw.set(key, FORGED)
    for _ in range(3):
        assert keys.failure() is None
        assert keys.peek("said/begun") is None
    assert sum(FAILED in line for line in caplog.messages) == 1
    keys.fail(2, "no disk")  # the true one replaces it
    assert str(keys.failure()) == "rank 2 cannot continue: no disk"
    keys.fail(0, "a consequence")
    assert "no disk" in str(keys.failure())


def test_the_place_of_a_rank_is_taken_once_and_not_by_an_unknown_process(keys: RankKeys, raw: Any) -> None:
    raw.set("process/1", FORGED)
    assert keys.compare_set("process/1", "", "first") == b"first"
    assert keys.compare_set("process/1", "", "second") == b"first"
    assert keys.compare_set("process/1", "first", "third") == b"third"


def test_a_process_that_waits_for_a_key_is_told_that_a_rank_has_failed(keys: RankKeys) -> None:
    threading.Timer(0.1, keys.fail, (1, "it was told to stop")).start()
    with pytest.raises(FailedPeerError, match="rank 1 cannot continue: it was told to stop"):
        keys.get("process/1")


def test_they_are_kept_at_one_address_of_the_machine() -> None:
    before = listening(os.getpid())
    keys = keep_keys("127.0.0.3", TOKEN)
    assert listening(os.getpid()) - before == {("127.0.0.3", keys.port)}
    assert join_attempt(reach_keys("127.0.0.3", keys.port), TOKEN).attempt == keys.attempt
    with pytest.raises(ListenError, match=rf"at 127\.0\.0\.3:{keys.port}"):
        keep_keys("127.0.0.3", TOKEN, keys.port)


def test_all_connections_of_ranks_are_at_their_address() -> None:
    before = listening(os.getpid())
    with connected(2):
        hosts = {host for host, _ in listening(os.getpid()) - before}
    assert hosts == {"127.0.0.1"}
