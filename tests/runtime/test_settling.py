import pytest

from monolith.runtime.config import RunConfig, settle
from monolith.runtime.config_loading import load_run_config
from monolith.train import DailyHours


def load(**values: object) -> RunConfig:
    return load_run_config(code=values)


def test_the_model_is_named_after_the_job_or_the_task():
    assert settle(load(model_name="m", deep_insight_name="j")).model_name == "m"
    assert settle(load(deep_insight_name="j")).model_name == "j"
    assert settle(load(task="tasks.ctr:MyTask")).model_name == "di_name_MyTask"
    assert settle(load(task="tasks.ctr.MyTask")).model_name == "di_name_MyTask"


@pytest.mark.parametrize(
    "values, retries", [({}, 6), ({"max_retry_times": 2}, 2), ({"max_retry_times": 0}, 6)]
)
def test_a_worker_joins_again_six_times_unless_told(values, retries):
    assert settle(load(**values)).failover.max_retries == retries


def test_no_retries_can_be_asked_for():
    assert settle(load_run_config(code={"failover.max_retries": 0})).failover.max_retries == 0


def test_without_a_limit_of_their_own_calls_have_that_of_lookups():
    timeouts = settle(load(max_rpc_deadline_millis=7000)).timeouts
    assert timeouts.operation == timeouts.lookup


def test_a_daily_window_ends_the_run_unless_it_says_how_to_save_outside():
    window = {"tide_start_hour": 1, "tide_start_minute": 2, "tide_end_hour": 3, "tide_end_minute": 4}
    assert settle(load(**window)).train.hours == DailyHours(1, 2, 3, 4)
    train = settle(load(**window, tide_save_secs=60)).train
    assert train.hours is None
    assert (train.save.hours, train.save.secs_outside_hours) == (DailyHours(1, 2, 3, 4), 60)


def test_settling_again_changes_nothing():
    once = settle(load(model_dir="/m"))
    assert settle(once) == once
