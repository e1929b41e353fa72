import threading

import pytest

from monolith.config import UniqueNames, to_snake_case


@pytest.mark.parametrize(
    ("name", "snake"),
    [
        ("FeatureTask", "feature_task"),
        ("TestFFMModel", "test_ffm_model"),
        ("ABTest", "ab_test"),
        ("HTTPServer2", "http_server2"),
        ("Conv2D", "conv2d"),
        ("_PrivateThing", "private__private_thing"),
        ("already_snake", "already_snake"),
        ("X", "x"),
        ("", ""),
    ],
)
def test_class_names_become_snake_case(name, snake):
    assert to_snake_case(name) == snake


def test_a_name_is_given_once_and_then_numbered():
    names = UniqueNames()
    assert [names.unique("dense") for _ in range(3)] == ["dense", "dense_1", "dense_2"]
    assert names.unique("sparse") == "sparse"


def test_a_number_that_someone_took_by_name_is_stepped_over():
    names = UniqueNames()
    names.unique("dense_1")
    assert [names.unique("dense") for _ in range(2)] == ["dense", "dense_2"]


def test_two_givers_do_not_know_each_other():
    assert UniqueNames().unique("dense") == UniqueNames().unique("dense")


def test_threads_never_get_the_same_name():
    names, got = UniqueNames(), []
    threads = [
        threading.Thread(target=lambda: got.extend(names.unique("x") for _ in range(200))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 800
