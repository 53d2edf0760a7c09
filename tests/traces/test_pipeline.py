"""The ring between computing and writing, and how a step is packed into one of its buffers."""

import threading
import time

import pytest
import torch
from kvsim_traces.packing import StepLayout
from kvsim_traces.pipeline import Pipeline, places_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def feed(pipeline, numbers, seen=None, error=None):
    """Submit buffers full of numbers; stop where the pipeline says so; raise an error in the end."""
    for number in numbers:
        place = pipeline.acquire()
        if pipeline.stopped:
            return
        place.device.fill_(number)
        pipeline.submit(place, 3, number)
        if seen is not None:
            seen.append(number)
    if error is not None:
        raise error


def test_steps_arrive_whole_and_in_order():
    pipeline, found = Pipeline(DEVICE, 5, places=2), []

    def consume(buffer, number):
        time.sleep(0.002 * (number % 3))
        found.append((number, buffer[:3].tolist()))
        return False

    with pipeline.feeding(consume):
        feed(pipeline, range(1, 40))
    assert found == [(number, [number] * 3) for number in range(1, 40)]
    assert pipeline.consumed == 39
    assert threading.active_count() == len(threading.enumerate())
    assert "kvsim-writer" not in [thread.name for thread in threading.enumerate()]


def test_no_more_steps_are_under_way_than_there_are_places():
    pipeline, given, gate = Pipeline(DEVICE, 4, places=3), [], threading.Event()

    def consume(buffer, number):
        gate.wait()
        return False

    feeder = threading.Thread(target=lambda: feed(pipeline, range(10), given))
    with pipeline.feeding(consume):
        feeder.start()
        feeder.join(0.3)
        assert feeder.is_alive()
        assert given == [0, 1, 2]
        gate.set()
        feeder.join()
    assert pipeline.consumed == 10


def test_an_error_of_the_thread_reaches_the_caller():
    pipeline, found, given = Pipeline(DEVICE, 4, places=2), [], []

    def consume(buffer, number):
        if number == 3:
            raise OSError("disk full")
        found.append(number)
        return False

    with pytest.raises(OSError, match="disk full"), pipeline.feeding(consume):
        feed(pipeline, range(1000), given)
    assert found == [0, 1, 2]
    assert len(given) < 10


def test_an_error_of_the_last_step_is_not_lost():
    pipeline = Pipeline(DEVICE, 4)

    def consume(buffer, number):
        time.sleep(0.05)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), pipeline.feeding(consume):
        feed(pipeline, [1])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_of_the_caller_waits_for_what_was_submitted(error):
    pipeline, found = Pipeline(DEVICE, 4, places=4), []

    def consume(buffer, number):
        time.sleep(0.02)
        found.append(number)
        return False

    with pytest.raises(error), pipeline.feeding(consume):
        feed(pipeline, range(4), error=error)
    assert found == [0, 1, 2, 3]


def test_a_second_interrupt_drops_what_is_not_in_hand(monkeypatch):
    pipeline, found, joins = Pipeline(DEVICE, 4, places=4), [], []

    def consume(buffer, number):
        time.sleep(0.1)
        found.append(number)
        return False

    join = threading.Thread.join

    def interrupted(self, timeout=None):
        if self.name == "kvsim-writer" and not joins:
            joins.append(1)
            time.sleep(0.05)
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt), pipeline.feeding(consume):
        feed(pipeline, range(4), error=KeyboardInterrupt)
    assert found == [0]


def test_steps_after_the_last_wanted_one_are_dropped():
    pipeline, found, given = Pipeline(DEVICE, 4, places=4), [], []

    def consume(buffer, number):
        found.append(number)
        return number == 5

    with pipeline.feeding(consume):
        feed(pipeline, range(1000), given)
    assert found == [0, 1, 2, 3, 4, 5]
    assert pipeline.stopped
    assert len(given) < 15


def test_how_many_places():
    assert [places_for(size) for size in (1, 2**25, 2**26, 2**27, 2**30)] == [8, 8, 4, 2, 2]


@pytest.mark.parametrize(
    ("capture", "names"),
    [
        ("heads", {"attention": (3, 4, 9)}),
        ("scores", {"scores": (3, 9)}),
        ("qk", {"queries": (3, 4, 8), "keys": (3, 2, 8)}),
        ("qkv", {"queries": (3, 4, 8), "keys": (3, 2, 8), "values": (3, 2, 8)}),
    ],
)
@pytest.mark.parametrize("number", ["float16", "float32"])
def test_arrays_of_a_step_lie_apart(capture, names, number):
    layout = StepLayout(capture, 3, 4, 2, 8, number)
    buffer = torch.zeros(layout.nbytes(9), dtype=torch.uint8)
    views = layout.views(buffer, 9)
    assert {name: tuple(view.shape) for name, view in views.items()} == {"token": (1,), "row_sums": (3, 4), **names}
    rows = {"attention", "scores"}
    kinds = {name: torch.float16 if name in rows else getattr(torch, number) for name in names}
    assert {name: view.dtype for name, view in views.items()} == {
        "token": torch.int64, "row_sums": torch.float32, **kinds,
    }  # fmt: skip
    for index, view in enumerate(views.values(), 1):
        view.fill_(index)
    for index, view in enumerate(views.values(), 1):
        assert (view == index).all()
    assert layout.nbytes(10) >= layout.nbytes(9)
