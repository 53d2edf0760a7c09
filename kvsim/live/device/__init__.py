"""Closed-loop replay with everything where the model is: rows, states and sets never cross to the host."""

from kvsim.live.device.loop import DeviceLoop, closed_loop_on_device

__all__ = ["DeviceLoop", "closed_loop_on_device"]
