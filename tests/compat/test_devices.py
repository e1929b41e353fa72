import pytest
import torch

from monolith.errors import ConfigError
from monolith_compat.devices import Devices, cuda_variables, visible_gpu

CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.parametrize("rank, sharing, gpu", [(2, 1, 2), (1, 2, 0), (2, 2, 1), (3, 2, 1)])
def test_ranks_share_gpus_in_order(rank, sharing, gpu):
    assert visible_gpu(rank, sharing) == gpu


@pytest.mark.parametrize("rank, sharing", [(0, 0), (-1, 1)])
def test_ranks_and_sharers_must_make_sense(rank, sharing):
    with pytest.raises(ConfigError):
        visible_gpu(rank, sharing)


def test_a_rank_sees_its_gpu_alone_unless_the_user_has_chosen():
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
    assert devices.within("GPU:0").current == CPU
    with devices.within("GPU:0").current:
        assert torch.empty(1).device == CPU


def test_with_gpus_each_part_is_where_it_asks_and_outside_all_is_on_the_cpu():
    devices = Devices(gpu=True)
    assert devices.current == devices.allowed(None) == CPU
    outer = devices.within("CPU:0")
    first = outer.within("GPU:0")
    second = first.within("cuda:1")
    assert [one.current for one in (outer, first, second)] == [CPU, GPU0, GPU1]
    assert second.within(None).current == CPU


def test_what_a_part_asks_for_changes_nothing_for_others():
    devices = Devices(gpu=True)
    devices.within("GPU:0")
    assert devices == Devices(gpu=True)


def test_an_unknown_device_is_an_error():
    with pytest.raises(ConfigError, match="unknown device 'toaster'"):
        Devices(gpu=True).allowed("toaster")
