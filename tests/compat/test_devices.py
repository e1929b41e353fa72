import threading

import pytest
import torch

from monolith.compat.devices import Devices, cuda_variables, visible_gpu
from monolith.errors import ConfigError

CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.parametrize("rank, sharing, gpu", [(2, 1, 2), (1, 2, 0), (2, 2, 1), (3, 2, 1)])
def test_ranks_share_gpus_in_order(rank, sharing, gpu):
    assert visible_gpu(rank, sharing) == gpu


@pytest.mark.parametrize("rank, sharing", [(0, 0), (-1, 1)])
def test_ranks_and_sharers_must_make_sense(rank, sharing):
    with pytest.raises(ConfigError):
        visible_gpu(rank, sharing)


def test_a_rank_sees_its_gpu_alone_unless_somebody_has_chosen():
    environ = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3"}
    assert cuda_variables(environ) == expected
    assert cuda_variables(environ, 2)["CUDA_VISIBLE_DEVICES"] == "1"
    assert cuda_variables({**environ, "CUDA_VISIBLE_DEVICES": "7"}) == {}
    assert cuda_variables({}) == {}


def test_without_gpus_everything_is_on_the_cpu():
    devices = Devices(gpu=False)
    assert devices.current == CPU
    with devices.use("GPU:0") as device:
        assert device == devices.current == CPU
        assert torch.empty(1).device == CPU


def test_with_gpus_each_part_is_where_it_asks_and_outside_all_is_on_the_cpu():
    devices = Devices(gpu=True)
    assert devices.allowed(None) == CPU
    with devices.use("CPU:0"):
        assert devices.current == CPU
        with devices.use("GPU:0"):
            assert devices.current == GPU0
            with devices.use("cuda:1"):
                assert devices.current == GPU1
            assert devices.current == GPU0
        assert devices.current == CPU
    assert devices.current == CPU


def test_an_error_inside_leaves_the_place_as_well():
    devices = Devices(gpu=True)
    with pytest.raises(ValueError, match="boom"), devices.use("GPU:0"):
        raise ValueError("boom")
    assert devices.current == CPU


def test_threads_have_places_of_their_own():
    devices = Devices(gpu=True)
    seen: list[torch.device] = []
    with devices.use("GPU:0"):
        thread = threading.Thread(target=lambda: seen.append(devices.current))
        thread.start()
        thread.join()
    assert seen == [CPU]


def test_two_objects_do_not_know_each_other():
    allowed, forbidden = Devices(gpu=True), Devices(gpu=False)
    with allowed.use("GPU:0"):
        assert forbidden.current == CPU


def test_an_unknown_device_is_an_error():
    with pytest.raises(ConfigError, match="no device is called 'toaster'"):
        Devices(gpu=True).allowed("toaster")
