"""Recording on a GPU: decode steps follow one another while earlier ones are copied out and written by a thread."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvsim_traces.decoding import Decoder, choose
from kvsim_traces.device_capture import DeviceCapture
from kvsim_traces.errors import TraceError
from kvsim_traces.layout import POSITION_ARRAYS
from kvsim_traces.packing import StepLayout
from kvsim_traces.pipeline import Pipeline, Place
from kvsim_traces.request import Request
from kvsim_traces.token_text import TokenText
from kvsim_traces.writer import TraceWriter

__all__ = ["Overlapped", "memory_error", "overlapped_device"]


def overlapped_device(model: Any) -> torch.device | None:
    """Return the GPU that holds the whole model; None elsewhere: steps are then recorded one after the other."""
    devices = {parameter.device for parameter in model.parameters()}
    device = devices.pop()
    return device if device.type == "cuda" and not devices else None


def memory_error(reason: str) -> TraceError:
    """Give the error for a GPU's lack of memory.

    Parameters
    ----------
    reason : str
        What PyTorch said; its first sentence is kept.
    """
    return TraceError(
        f"model: {reason.partition('. ')[0]}; record a shorter prompt, or do without what takes memory: check=False, "
        "prompt_mass=False, kvzip=False"
    )


class Overlapped:
    """The steps of one recording on a GPU.

    Nothing in a step waits for the GPU, unless tokens are sampled: greedy tokens stay on the device, and the thread
    that writes them says when one ends the sequence; the steps begun by then are dropped.

    Parameters
    ----------
    device : torch.device
    decoder : Decoder
        After its prefill.
    request : Request
    capture : DeviceCapture
        Observes the decoder's model during each step.
    layout : StepLayout
    banned, ends : list of int
        Tokens never chosen, and those that end the sequence.
    generator : torch.Generator
        On the CPU.
    places : int, optional
        Steps on their way at a time.
    """

    def __init__(
        self,
        device: torch.device,
        decoder: Decoder,
        request: Request,
        capture: DeviceCapture,
        layout: StepLayout,
        *,
        banned: list[int],
        ends: list[int],
        generator: torch.Generator,
        places: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._request = request
        self._capture = capture
        self._layout = layout
        self._ends = ends
        self._generator = generator
        self._pipeline = Pipeline(device, layout.nbytes(len(request.prompt) + request.steps), places)
        self._banned = torch.tensor(banned, dtype=torch.long, device=device)
        self._forced = None if request.forced is None else torch.tensor(request.forced, device=device)
        self._place: Place | None = None
        self._logits = torch.empty(0)

    def first(self, token: int, keep: bool) -> None:
        """Run step 1 and hold it until `write`; `keep` is for the check."""
        self._place = self._pipeline.acquire()
        self._step(1, self._place, torch.tensor([token], device=self._place.device.device), keep)

    def write(self, writer: TraceWriter, text: TokenText | None, progress: Callable[[int, int], None] | None) -> None:
        """Hand step 1 to the writer, then run the others and hand them over.

        Raises
        ------
        TraceError
            If a step cannot be computed or written.
        """
        total, told = self._request.steps, 0

        def consume(buffer: torch.Tensor, t: int) -> bool:
            return self._append(writer, text, buffer, t)

        # What the prompt left to flush does not hold up the steps.
        writer.commit()
        pipeline = self._pipeline
        with pipeline.feeding(consume):
            assert self._place is not None
            place, self._place = self._place, None
            for t in range(1, total + 1):
                if t > 1:
                    token = self._next(t)
                    place = pipeline.acquire()
                    if pipeline.stopped:
                        break
                    self._step(t, place, token)
                pipeline.submit(place, self._layout.nbytes(self._positions(t)), t)
                told = _tell(progress, told, pipeline.consumed, total)
        _tell(progress, told, pipeline.consumed, total)

    def release(self) -> None:
        """Let go of the buffers and the last logits."""
        self._place, self._logits = None, torch.empty(0)
        self._pipeline.release()

    def _positions(self, t: int) -> int:
        return len(self._request.prompt) + t

    def _step(self, t: int, place: Place, token: torch.Tensor, keep: bool = False) -> None:
        n = self._positions(t)
        self._capture.begin_into(self._layout.views(place.device, n), n - 1, keep)
        self._logits = self._decoder.step(token)
        self._capture.finish(token)

    def _next(self, t: int) -> torch.Tensor:
        """Give step t's token, [1]."""
        if self._forced is not None:
            return self._forced[t - 1 : t]
        if self._request.temperature == 0:
            # Set by a kernel: an index from the host would have to be copied first.
            return self._logits.index_fill(0, self._banned, -torch.inf).argmax().view(1)
        chosen = choose(self._logits, self._request.temperature, self._generator, self._banned.tolist())
        return torch.tensor([chosen], device=self._logits.device)

    def _append(self, writer: TraceWriter, text: TokenText | None, buffer: torch.Tensor, t: int) -> bool:
        arrays = {name: view.numpy() for name, view in self._layout.views(buffer, self._positions(t)).items()}
        token = int(arrays.pop("token")[0])
        for name in ("queries", *POSITION_ARRAYS):
            if name in arrays and arrays[name].dtype == np.float16 and np.isinf(arrays[name]).any():
                raise TraceError(f"{name} of step {t}: a value does not fit float16; record with qk_dtype='float32'")
        try:
            writer.append(token=token, text=None if text is None else text([token])[0], scaled=True, **arrays)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(f"{writer.path}: writing step {t} failed: {type(error).__name__}: {error}") from error
        return token in self._ends


def _tell(progress: Callable[[int, int], None] | None, told: int, done: int, total: int) -> int:
    """Report the steps that have been written since; return how many have been reported."""
    while progress is not None and told < done:
        told += 1
        progress(told, total)
    return told
