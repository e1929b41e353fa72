import pytest

from monolith.errors import RequestError
from monolith.sync.publish_messages import PublishOrder, operator_order


def test_what_a_person_asks_for_becomes_an_order() -> None:
    assert operator_order("status") == PublishOrder("status")
    assert operator_order("hold", reason="lunch") == PublishOrder("hold", "lunch")
    assert operator_order("rollback", version="1200") == PublishOrder("rollback", version="1200")


@pytest.mark.parametrize(
    ("action", "how", "says"),
    [
        ("stop", {}, "'stop' is none of status, hold, resume, rollback"),
        ("rollback", {}, "names the exported version"),
        ("hold", {"version": "7"}, "names the exported version"),
        ("rollback", {"version": "../7"}, "no exported version"),
        ("rollback", {"version": ".."}, "no exported version"),
        ("rollback", {"version": "a/b"}, "no exported version"),
        ("rollback", {"version": "7" * 256}, "no exported version"),
        ("hold", {"reason": "x" * 5000}, "reason"),
    ],
)
def test_what_makes_no_sense_is_refused(action: str, how: dict[str, str], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        operator_order(action, **how)
