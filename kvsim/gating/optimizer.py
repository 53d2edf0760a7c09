"""AdamW, and its numbers on their way to and from a checkpoint."""

from collections.abc import Mapping

import numpy as np
import torch

from kvsim.gating.checkpoint import Arrays

__all__ = ["arrays_of", "make_optimizer", "restore"]

Parameters = Mapping[str, torch.nn.Parameter]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(parameters: Parameters, weight_decay: float) -> torch.optim.AdamW:
    """Make AdamW over some parameters; its rate is set before each update."""
    return torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=weight_decay)


def arrays_of(parameters: Parameters, optimizer: torch.optim.AdamW) -> Arrays:
    """Give parameters and moments as a checkpoint holds them; moments are zero before the first update."""
    found = {}
    for name, parameter in parameters.items():
        found[name] = parameter.detach().cpu().numpy().copy()
        for moment in _MOMENTS:
            held = optimizer.state.get(parameter, {}).get(moment)
            found[f"{name}.{moment}"] = np.zeros_like(found[name]) if held is None else held.cpu().numpy().copy()
    return found


def restore(parameters: Parameters, optimizer: torch.optim.AdamW, arrays: Arrays, step: int) -> None:
    """Set parameters and moments to those of a checkpoint after `step` updates."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(arrays[name]))
            moments = {moment: torch.from_numpy(arrays[f"{name}.{moment}"]).to(parameter.device) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
