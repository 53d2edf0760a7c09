"""Batches of plans, the launches that replay them, and the outcomes."""

# mypy: disable-error-code="import-untyped"

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from kvsim_kernels.replay.kernel import replay_general, replay_resident
from kvsim_traces import Trace

from kvsim.engines.gpu.metrics import OutputErrors, RawMetrics, attention_reader
from kvsim.engines.gpu.rows import Piece, device, free_bytes, pieces
from kvsim.engines.gpu.tables import Tables, bytes_of
from kvsim.engines.gpu.variant import Variant, largest_visible
from kvsim.engines.outcome import METRICS, Mode, Outcome, Progress
from kvsim.plan import Plan

__all__ = ["run_batches"]

BATCH_BYTES = 2**40
"""Most bytes that the plans of one launch may take, and never more than half of the free memory."""

RESIDENT = 4096
"""Most positions that a program holds in registers."""

WHOLE = 8192
"""Most positions that the general kernel takes as one block; longer ones are walked through in blocks of `PART`."""

PART = 2048

TILE = 64
"""Most columns that are summed up at a time."""


def run_batches(
    trace: Trace, plans: Sequence[Plan], *, shadow: bool, raw: bool, mode: Mode, progress: Progress | None
) -> list[Outcome]:
    """Replay plans that the kernels can run; see `kvsim.engines.gpu.run_many`."""
    variants: dict[Variant, list[int]] = defaultdict(list)
    for index, plan in enumerate(plans):
        variants[Variant.of(plan)].append(index)
    outcomes: dict[int, Outcome] = {}
    for variant, members in variants.items():
        for batch in _batches(trace, plans, variant, members, shadow):
            run = _Run(trace, [plans[i] for i in batch], variant, shadow=shadow, raw=raw, mode=mode)
            for piece in pieces(trace):
                run.replay(piece)
            outcomes.update(zip(batch, run.outcomes(), strict=True))
            if progress is not None and len(plans) > 1:
                progress(len(outcomes), len(plans))
    if progress is not None and len(plans) == 1:
        progress(trace.num_steps, trace.num_steps)
    return [outcomes[i] for i in range(len(plans))]


def _batches(
    trace: Trace, plans: Sequence[Plan], variant: Variant, members: list[int], shadow: bool
) -> list[list[int]]:
    """Split plans into batches that fit the memory, in ascending order of how many positions they hold."""
    limit = min(BATCH_BYTES, free_bytes() // 2)
    batches: list[list[int]] = [[]]
    used = 0
    for i in sorted(members, key=lambda i: largest_visible(plans[i])):
        size = bytes_of(trace, plans[i], variant, shadow=shadow)
        if batches[-1] and used + size > limit:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += size
    return batches


class _Run:
    """Plans of one variant on their way through a trace."""

    def __init__(
        self, trace: Trace, plans: list[Plan], variant: Variant, *, shadow: bool, raw: bool, mode: Mode
    ) -> None:
        self.trace, self.plans, self.variant, self.shadow, self.mode = trace, plans, variant, shadow, mode
        self.groups = plans[0].groups
        self.visible = [trace.num_positions if shadow else largest_visible(plan) for plan in plans]
        self.tables = Tables.of(trace, plans, variant, shadow=shadow)
        self.raw: RawMetrics | None = None
        self.errors: OutputErrors | None = None
        self.scale = 1.0
        if raw:
            budgets = torch.from_numpy(np.stack([plan.budgets for plan in plans])).to(device())
            self.raw = RawMetrics(self.groups, trace.num_steps, budgets)
            if trace.has("values") and trace.capture != "scores":
                values = np.stack([trace.values(layer) for layer in self.groups.layers])
                values = torch.from_numpy(values).to(device()).double()
                self.errors = OutputErrors(self.groups, values, len(plans), trace.num_steps)

    def replay(self, piece: Piece) -> None:
        """Take the steps of a piece."""
        self.scale = piece.scale
        first, last = piece.first + (piece.first > 0), piece.last + 1
        self._general(piece, 0, len(self.plans), first, min(last, 2), self.trace.num_positions)
        first = max(first, 2)
        if first < last:
            blocks = [_block(visible) for visible in self.visible]
            for block in sorted(set(blocks)):
                start = blocks.index(block)
                stop = start + blocks.count(block)
                visible = self.visible[stop - 1]
                fits = self.variant.resident and not self.shadow and visible <= RESIDENT
                launch = self._resident if fits else self._general
                launch(piece, start, stop, first, last, visible)
        if self.raw is not None:
            self._measure(piece)

    def _general(self, piece: Piece, start: int, stop: int, first: int, last: int, visible: int) -> None:
        if first >= last:
            return
        block = _block(visible) if visible <= WHOLE else PART
        variant, tables = self.variant, self.tables
        replay_general[((stop - start) * self.groups.count,)](
            **self._common(piece, start, first, last, block),
            kv_heads=tables.shape["kv_heads"],
            dim=tables.shape["dim"],
            **{name: tables.given[name] for name in ("queries", "weight")},
            **{name: tables.state[name] for name in ("keys", "s", "share", "ring", "peak", "guard", "member")},
            **{name: tables.answers[name] for name in ("both", "history")},
            WEIGHTED=variant.weighted,
            ENTROPY=variant.entropy,
            PIVOTAL=variant.pivotal,
            SIGNED=variant.signed,
            WINDOWED=variant.windowed,
            RESCUED=variant.rescued,
            LAYERWISE=variant.layerwise,
            SHADOW=self.shadow,
            ONE_BLOCK=visible <= block,
            enable_fp_fusion=False,
        )

    def _resident(self, piece: Piece, start: int, stop: int, first: int, last: int, visible: int) -> None:
        shape = self.tables.shape
        packed = piece.data.dtype == torch.float16 and shape["heads"] == 1 and self.groups.kind == "shared"
        packed = packed and self.variant.kind == 0
        replay_resident[((stop - start) * self.groups.count,)](
            **self._common(piece, start, first, last, _block(visible)),
            words=piece.words,
            WORDS=-(-shape["depth"] // 4) if packed else 0,
            DTYPE=tl.float64 if self.mode == "exact" else tl.float32,
            enable_fp_fusion=self.mode == "fast",
        )

    def _common(self, piece: Piece, start: int, first: int, last: int, block: int) -> dict[str, Any]:
        trace, tables, shape = self.trace, self.tables, self.tables.shape
        given = ("programs", "batch", "a", "b", "scored", "evicts", "source", "admitted", "targets")
        span = max(shape["depth"] * shape["heads"], shape["dim"])
        return {
            "rows": piece.data,
            "bases": piece.bases,
            "stride": piece.stride,
            "scale": piece.scale,
            "depth": shape["depth"],
            "heads": shape["heads"],
            "prompt": trace.prompt_length,
            "steps": trace.num_steps,
            "first_program": start * self.groups.count,
            "first_step": first,
            "last_step": last,
            "position_bits": trace.num_positions.bit_length(),
            **{name: tables.given[name] for name in given},
            **{name: tables.state[name] for name in ("sizes", "pos", "m", "factor")},
            **{name: tables.answers[name] for name in ("evicted_at", "kept_mass", "ties", "retained")},
            "KIND": self.variant.kind,
            "HIGHEST": self.variant.highest,
            "ADMITTED": self.variant.admitted,
            "TARGETED": self.variant.targeted,
            "RENORMALISE": trace.capture != "scores" and not self.shadow,
            "BLOCK": block,
            "TILE": min(TILE, _power(span)),
            "num_warps": min(16, max(1, block // 128)),
        }

    def _measure(self, piece: Piece) -> None:
        """Compute what needs the full cache's rows for the steps of a piece."""
        assert self.raw is not None
        attention = attention_reader(piece, self.trace.prompt_length, len(self.groups.layers))
        for t in range(piece.first, piece.last):
            a = attention(t)
            kept = self._retained(t + 1, a.shape[0])
            self.raw.step(t, a, kept)
            if self.errors is not None:
                visible = self._retained(t, a.shape[0])
                visible[..., a.shape[0] - 1] = True
                self.errors.step(t, a, visible)

    def _retained(self, step: int, n: int) -> Any:
        """Mark what is retained after a step, bool [P, G, n]."""
        answers, shape = self.tables.answers, (len(self.plans), self.groups.count, n)
        if not self.shadow:
            evicted_at = answers["evicted_at"][:, :n]
            return ((evicted_at < 0) | (evicted_at > step)).reshape(shape)
        if step == 0:
            return torch.ones(shape, dtype=torch.bool, device=device())
        return answers["history"][:, step - 1, :n].bool().reshape(shape)

    def outcomes(self) -> list[Outcome]:
        """Bring the answers home."""
        prompt, steps = self.trace.prompt_length, self.trace.num_steps
        plans, groups = len(self.plans), self.groups.count
        shape = self.tables.shape

        def home(name: str) -> npt.NDArray[Any]:
            array: npt.NDArray[Any] = self.tables.answers[name].cpu().numpy()
            return array.reshape(plans, groups, *array.shape[1:])

        evicted_at, retained = home("evicted_at"), home("retained")
        history = home("history").view(np.bool_) if self.shadow else None
        t = np.arange(steps)
        newest = (evicted_at[..., prompt:] != t + 1) if history is None else history[:, :, t, prompt + t]
        columns = {name: np.full((plans, groups, steps), np.nan) for name in METRICS}
        columns["kept_mass"] = home("kept_mass") * (self.scale / (shape["depth"] * shape["heads"]))
        columns["ties"], columns["retained"], columns["newest_kept"] = home("ties"), retained, newest
        before = retained[..., :-1]
        both = home("both")[..., 1:] if self.shadow else retained[..., 1:] - newest[..., 1:]
        either = before + retained[..., 1:] - both
        columns["churn"][..., 1:] = np.where(either > 0, 1 - both / np.maximum(either, 1), 0)
        if self.raw is not None:
            columns.update({name: column.cpu().numpy() for name, column in self.raw.columns.items()})
        averages = {name: column.astype(np.float64).mean(axis=1) for name, column in columns.items()}
        if self.errors is not None:
            averages["output_error"] = self.errors.errors.cpu().numpy()
        return [
            Outcome(
                None if self.shadow else evicted_at[p],
                None if history is None else history[p].transpose(1, 0, 2),
                {name: averages[name][p] for name in METRICS},
            )
            for p in range(plans)
        ]


def _block(positions: int) -> int:
    return max(16, _power(positions))


def _power(number: int) -> int:
    """Give the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()
