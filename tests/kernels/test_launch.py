"""What launches share."""

import torch
from kvsim_kernels import launch


def test_split_counts(monkeypatch):
    assert launch.split_count(8, 65536, torch.device("cpu")) == 1
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    rows_and_slots = ((8, 65536), (8, 640), (8, 1), (32, 6400), (792, 64))
    assert [launch.split_count(*given, None) for given in rows_and_slots] == [33, 10, 1, 8, 1]


def test_kernels_start_early_from_hopper_on_unless_told_not_to(monkeypatch):
    can = launch._can_launch_early.__wrapped__
    monkeypatch.delenv(launch.SERIAL, raising=False)
    assert launch.early_launch(torch.device("cpu")) == {"EARLY": False}
    for capability, early in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert can(torch.device("cuda")) == early
    monkeypatch.setattr(launch, "_can_launch_early", lambda device: True)
    assert launch.early_launch(torch.device("cuda")) == {"EARLY": True, "launch_pdl": True}
    monkeypatch.setenv(launch.SERIAL, "1")
    assert launch.early_launch(torch.device("cuda")) == {"EARLY": False}
