"""What launches share."""

import torch
from kvsim_kernels import launch


def test_split_counts(monkeypatch):
    assert launch.split_count(8, 65536, torch.device("cpu")) == 1
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    rows_and_slots = ((8, 65536), (8, 640), (8, 1), (32, 6400), (792, 64))
    assert [launch.split_count(*given, None) for given in rows_and_slots] == [33, 10, 1, 8, 1]
