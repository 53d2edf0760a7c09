"""Time the kernels of KV admission at Llama-3.1-8B's shape beside dense attention and beside what memory allows.

    PYTHONPATH=.:kernels python kernels/benchmarks/admission_kernels.py --out admission_kernels_h200.json

Prints medians, and ratios within the run. Every way of cutting vertical-slash attention is first checked in a process
of its own, all at once, against plain PyTorch in float32: one that is wrong, fails or hangs is named and left out. All
of them are timed at the shortest length, and the `--keep` fastest at the others. flash-attn-4 takes part where it is
installed with what it needs (nvidia-cutlass-dsl and its libraries, apache-tvm-ffi, torch-c-dlpack-ext, quack-kernels).
Triton's specialised warps are no candidates: with Triton 3.6 they do not end on an H200.
Needs a CUDA GPU; `--smoke` runs everything at tiny sizes in Triton's interpreter instead, where times mean nothing.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from kvsim_kernels.gather_admitted import gather_admitted as gather_reference
from kvsim_kernels.launch import multiprocessors
from kvsim_kernels.merge_partials.kernel import merge_partials
from kvsim_kernels.paged_decode import PAGE
from kvsim_kernels.paged_decode import paged_decode as paged_reference
from kvsim_kernels.paged_decode.kernel import paged_decode
from kvsim_kernels.promote.kernel import promote
from kvsim_kernels.vertical_slash import Admitted, vertical_slash_reference
from kvsim_kernels.vertical_slash.kernel import Tiling, gather_admitted, seen_by_chunk, vertical_slash
from kvsim_kernels.write_gate import write_gate as gate_reference
from kvsim_kernels.write_gate.kernel import write_gate
from kvsim_kernels.write_gate_step import write_gate_step as gate_step_reference
from kvsim_kernels.write_gate_step.kernel import write_gate_step
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PARTS = ("vertical", "gather", "decode", "promote", "gate", "gate step")
TILINGS = {
    "pointers 128x64": Tiling(pack=False),
    "packed 128x64": Tiling(),
    "packed 128x128": Tiling(columns=128, stages=2),
    "descriptors 128x64": Tiling(descriptors=True),
    "descriptors 128x128": Tiling(descriptors=True, columns=128, stages=2),
    "split 128x128": Tiling(split=True, columns=128, stages=2),
    "split 128x128, 3 stages": Tiling(split=True, columns=128, stages=3),
    "split 256x64": Tiling(split=True, rows=256, stages=2),
    "split 128x64": Tiling(split=True),
    "split 128x32, two at once": Tiling(split=True, columns=32, registers=128),
    "split 64x128, 4 warps": Tiling(split=True, rows=64, columns=128, warps=4, stages=2),
}
OVER = "split 128x128, 3 stages, over a copy of the queries"
FLASH_4 = "flash-attn-4 on gathered keys"
CHUNK = 2048
LIMIT = 1e-2


@dataclass(frozen=True)
class Shape:
    """What is measured, and where."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    lengths: tuple[int, ...]
    check_length: int
    window: int
    share: float
    chunk: int
    device: str
    dtype: torch.dtype
    layers: int = 32

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


def tools() -> ModuleType:
    """Load the benchmark of the other kernels, which lies beside this one."""
    name = "kernel_benchmark_tools"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("kernels.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def median_ms(call: Callable[[], Any], device: str, repeats: int = 3) -> float:
    """Median time of a call after one that is not counted."""
    call()
    times = []
    for _ in range(repeats if device == "cuda" else 1):
        if device == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
    return sorted(times)[len(times) // 2]


def graph_ms(call: Callable[[Any], Any], sets: list[Any], device: str) -> float:
    """Median time of a call out of a CUDA graph that takes every set of inputs in turn."""
    if device == "cuda":
        return float(tools().graphed_us(call, sets)) / 1e3
    return median_ms(lambda: call(sets[0]), device)


def normal(shape: Shape, *size: int) -> torch.Tensor:
    """Draw standard normal numbers."""
    return torch.randn(size, dtype=shape.dtype, device=shape.device)


def drawn_mask(shape: Shape, length: int) -> torch.Tensor:
    """Draw which positions each KV head admits: exactly that share of them, the same in every head."""
    kept = max(1, round(length * shape.share))
    mask = torch.zeros(shape.kv_heads, length, dtype=torch.bool, device=shape.device)
    for head in range(shape.kv_heads):
        mask[head, torch.randperm(length, device=shape.device)[:kept]] = True
    return mask


def flash_4() -> Any:
    """Import flash-attn-4."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        packages = str(Path(folder) / "dsl_packages")
        if packages not in sys.path:
            sys.path.append(packages)
    return importlib.import_module("flash_attn.cute")


def flash_4_on_gathered(
    shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, admitted: Admitted, tiling: Tiling | None
) -> torch.Tensor:
    """Let flash-attn-4 take the admitted keys that whole chunks of queries see, and our kernel the rest.

    Every chunk of every KV head is a sequence of its own, whose keys are the first ones of its head.
    """
    length, chunk = query.shape[1], shape.chunk
    counts = seen_by_chunk(admitted, length, window=shape.window, chunk=chunk)
    chunks = counts.shape[1]
    first = (torch.arange(chunks, device=query.device, dtype=torch.int32) * chunk).clamp(max=length)
    heads = torch.arange(shape.kv_heads, device=query.device, dtype=torch.int32)
    ends = torch.full((1,), shape.kv_heads * length, device=query.device, dtype=torch.int32)
    queries = query.view(shape.kv_heads, shape.group, length, -1).transpose(1, 2).reshape(-1, shape.group, shape.dim)
    dense, lse = flash_4().flash_attn_varlen_func(
        queries, admitted.keys[:, None], admitted.values[:, None],
        cu_seqlens_q=torch.cat([(heads[:, None] * length + first).flatten(), ends]),
        cu_seqlens_k=torch.cat([admitted.starts[:-1].repeat_interleave(chunks), admitted.starts[-1:]]),
        seqused_k=counts.flatten().contiguous(), max_seqlen_q=chunk, max_seqlen_k=length, causal=False, return_lse=True,
    )  # fmt: skip
    rest = vertical_slash(query, key, value, admitted, window=shape.window, chunk=chunk, return_lse=True, tiling=tiling)
    dense = dense.view(shape.kv_heads, length, shape.group, -1).transpose(1, 2).reshape(query.shape)
    lse = lse.view(shape.group, shape.kv_heads, length).transpose(0, 1).reshape(shape.heads, length)
    return merge_partials(rest.output, rest.lse, dense, lse, out=rest.output)[0]


def attend_with(
    name: str, shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, admitted: Admitted
) -> torch.Tensor:
    """Run the candidate of that name."""
    if name == FLASH_4:
        return flash_4_on_gathered(shape, query, key, value, admitted, TILINGS["packed 128x64"])
    if name == OVER:
        query = query.clone()
        tiling = TILINGS["split 128x128, 3 stages"]
        return vertical_slash(query, key, value, admitted, window=shape.window, tiling=tiling, out=query)
    return vertical_slash(query, key, value, admitted, window=shape.window, tiling=TILINGS[name])


def check_candidate(name: str, shape: Shape) -> float:
    """Give a candidate's relative error at a small size; heads admit different shares, one nothing."""
    length = shape.check_length
    query = normal(shape, shape.heads, length, shape.dim)
    key, value = (normal(shape, shape.kv_heads, length, shape.dim) for _ in range(2))
    shares = torch.linspace(0, 2 * shape.share, shape.kv_heads, device=shape.device)
    mask = torch.rand(shape.kv_heads, length, device=shape.device) < shares[:, None]
    found = attend_with(name, shape, query, key, value, gather_admitted(key, value, mask)).float()
    exact = vertical_slash_reference(query.float(), key.float(), value.float(), mask, window=shape.window).output
    return float((found - exact).norm() / exact.norm())


def checked_candidates(names: list[str], shape: Shape) -> dict[str, float | str]:
    """Give each candidate's error, or say in words what went wrong; on a GPU each has a process of its own."""
    found: dict[str, float | str] = {}
    if shape.device != "cuda":
        for name in names:
            try:
                found[name] = check_candidate(name, shape)
            except ImportError as problem:
                found[name] = str(problem)
        return found
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--check", name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )
        for name in names
    }  # fmt: skip
    limit = time.monotonic() + 150
    for name, process in running.items():
        try:
            said, complained = process.communicate(timeout=max(1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            found[name] = "did not end"
            continue
        if process.returncode:
            found[name] = (complained.strip().split("\n") or ["failed"])[-1][:200]
        else:
            found[name] = float(said.strip().split("\n")[-1])
    return found


def dense_baselines(shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[Any]:
    """Give causal attention over everything, by each library that is there."""
    q, k, v = query[None], key[None], value[None]

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if shape.device != "cuda":
        yield "SDPA math", lambda: sdpa(SDPBackend.MATH)
        return
    yield "FlashAttention-2", lambda: sdpa(SDPBackend.FLASH_ATTENTION)
    yield "cuDNN", lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
    try:
        attend = flash_4().flash_attn_func
    except Exception as problem:
        print(f"flash-attn-4 is left out: {problem!r:.200}")
        return
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    yield "flash-attn-4", lambda: attend(q, k, v, causal=True)


def vertical_row(shape: Shape, length: int, names: list[str]) -> dict[str, Any]:
    """Time candidates and dense attention at one length."""
    query = normal(shape, shape.heads, length, shape.dim)
    key, value = (normal(shape, shape.kv_heads, length, shape.dim) for _ in range(2))
    mask = drawn_mask(shape, length)
    admitted = gather_admitted(key, value, mask)

    def ours_with(name: str) -> Callable[[], torch.Tensor]:
        return lambda: attend_with(name, shape, query, key, value, admitted)

    ours = {}
    for name in names:
        ours[name] = median_ms(ours_with(name), shape.device)
        print(f"  {length:,} {name}: {ours[name]:.2f} ms", flush=True)
    gathering = median_ms(lambda: gather_admitted(key, value, mask), shape.device)
    dense: dict[str, float | str] = {}
    for name, call in dense_baselines(shape, query, key, value):
        try:
            dense[name] = median_ms(call, shape.device)
        except Exception as problem:
            dense[name] = f"{problem!r:.200}"
    row: dict[str, Any] = {
        "op": "vertical_slash",
        "length": length,
        "admitted": round(shape.share, 4),
        "window": shape.window,
        "ms": {name: round(ms, 3) for name, ms in ours.items()},
        "best": min(ours, key=lambda name: ours[name], default=None),
        "gather_ms": round(gathering, 3),
        "dense_ms": {name: round(ms, 3) if isinstance(ms, float) else ms for name, ms in dense.items()},
    }
    if ours:
        best = min(ours.values())
        # Two products: of the admitted share of half of all pairs, and of the band.
        pairs = length * (length / 2 * shape.share + shape.window)
        row["tflops"] = round(4 * shape.heads * shape.dim * pairs / best / 1e9, 1)
        for kind, extra in (("ratio", 0.0), ("ratio_with_gather", gathering)):
            row[kind] = {name: round(ms / (best + extra), 3) for name, ms in dense.items() if isinstance(ms, float)}
    return row


def vertical_part(shape: Shape, keep: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Time prefill attention of one layer."""
    errors = checked_candidates(names, shape)
    yield {"op": "vertical_slash check", "errors": errors}
    left = [name for name, problem in errors.items() if isinstance(problem, float) and problem < LIMIT]
    for length in sorted(shape.lengths):
        row = vertical_row(shape, length, left)
        yield row
        left = sorted(row["ms"], key=lambda name: row["ms"][name])[:keep]


def bytes_row(op: str, what: str, ms: float, moved: int, bandwidth: float | None, **more: Any) -> dict[str, Any]:
    """Put a time beside the bytes that must move."""
    row: dict[str, Any] = {"op": op, "shape": what, "us": round(ms * 1e3, 2), "bytes": moved, **more}
    if bandwidth is not None:
        row["floor_us"] = round(moved / bandwidth * 1e6, 2)
        row["bandwidth_share"] = round(moved / bandwidth / ms * 1e3, 4)
    return row


def gather_part(shape: Shape, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Time gathering with a capacity given, so that the host waits for nothing."""
    for length in shape.lengths:
        key, value = (normal(shape, shape.kv_heads, length, shape.dim) for _ in range(2))
        mask = drawn_mask(shape, length)
        count = int(mask.sum())
        found, exact = gather_admitted(key, value, mask, capacity=count), gather_reference(key, value, mask)
        same = all(torch.equal(a, b) for a, b in zip(vars(found).values(), vars(exact).values(), strict=True))
        ms = median_ms(lambda k=key, v=value, m=mask, c=count: gather_admitted(k, v, m, capacity=c), shape.device, 9)
        plain = median_ms(lambda k=key, v=value, m=mask: gather_reference(k, v, m), shape.device)
        moved = 2 * mask.numel() + count * (4 * shape.dim * key.element_size() + 4)
        yield bytes_row(
            "gather_admitted", f"{length:,}", ms, moved, bandwidth, torch_us=plain * 1e3, error=float(not same)
        )


def paged_rows(shape: Shape, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Draw a pool whose pages are handed out at random, a table and lengths."""
    pages = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(pages), device=shape.device).int()
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=shape.device)
    for row, part in enumerate(order.split(pages)):
        table[row, : len(part)] = part
    pools = [normal(shape, len(order), PAGE, shape.dim) for _ in range(2)]
    query = normal(shape, len(lengths), shape.group, shape.dim)
    return query, *pools, table, torch.tensor(lengths, dtype=torch.int32, device=shape.device)


def decode_part(shape: Shape, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Time a layer's decode attention: heads that admit alike, and heads that admit from a fifth to 1.8 times that."""
    for length in shape.lengths:
        tokens = length * shape.share
        spread = torch.linspace(0.2, 1.8, shape.kv_heads).tolist()
        for kind, factors in (("equal", [1.0] * shape.kv_heads), ("ragged", spread)):
            lengths = [max(1, round(tokens * factor)) + shape.window for factor in factors]
            moved = 2 * sum(lengths) * shape.dim * shape.dtype.itemsize
            sets = [paged_rows(shape, lengths) for _ in range(max(1, min(8, int(1e9 // moved))))]
            exact = paged_reference(*sets[0], dtype=torch.float64)
            error = float((paged_decode(*sets[0]).double() - exact).norm() / exact.norm())
            sms = multiprocessors(sets[0][0].device)
            tried = {
                times: graph_ms(lambda g, n=times * sms: paged_decode(*g, splits=n), sets, shape.device)
                for times in (1, 2, 3, 4)
            }
            best = min(tried, key=lambda times: tried[times])
            yield bytes_row(
                "paged_decode", f"{length:,} {kind}", tried[best], moved, bandwidth, error=error,
                programs_per_multiprocessor={times: round(ms * 1e3, 2) for times, ms in tried.items()},
            )  # fmt: skip


def promote_part(shape: Shape, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Time a step of lazy promotion in which half of the rows promote, beside two launches that do nothing."""
    nothing = torch.zeros(1, device=shape.device)

    def two_launches(_: Any) -> None:
        nothing.add_(1)
        nothing.add_(1)

    floor = graph_ms(two_launches, [None], shape.device)
    for rows in (shape.kv_heads, shape.layers * shape.kv_heads):
        ring, width = -(-shape.window // PAGE), 64
        pages = rows * (ring + width)
        pools = [normal(shape, pages, PAGE, shape.dim) for _ in range(2)]
        table = torch.zeros(rows, ring + width, dtype=torch.int32, device=shape.device)
        free = torch.arange(pages, dtype=torch.int32, device=shape.device)
        table[:, :ring] = free[: rows * ring].view(rows, ring)
        numbers = [torch.zeros(n, dtype=torch.int32, device=shape.device) for n in (1, rows, 1, 1, rows)]
        pointer, counts, top, status, new_slots = numbers
        top.fill_(pages - rows * ring)
        ring_gates = (torch.arange(rows * shape.window, device=shape.device) % 2).float().view(rows, shape.window)
        stack = free[rows * ring :].contiguous()
        given = (*pools, ring_gates, table, pointer, counts, stack, top, status, new_slots)

        def step(_: Any, given: tuple[torch.Tensor, ...] = given) -> None:
            promote(*given, window=shape.window, tau=0.5)

        ms = graph_ms(step, [None], shape.device)
        # What is promoted is read and written.
        moved = rows * 2 * shape.dim * shape.dtype.itemsize
        yield bytes_row(
            "promote", f"{rows} rows", ms, moved, bandwidth, two_launches_us=round(floor * 1e3, 2),
            error=float(int(status) != 0 or int(counts.sum()) == 0),
        )  # fmt: skip


def gate_part(shape: Shape, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Time the write gate of a layer, for a decode step and for prompts."""
    for count in (1, 8, *shape.lengths):
        scale = shape.dim**-0.5
        weights = (
            normal(shape, shape.kv_heads, shape.hidden, 2 * shape.dim) * scale,
            normal(shape, shape.kv_heads, shape.hidden),
            normal(shape, shape.kv_heads, shape.hidden),
            normal(shape, shape.kv_heads),
        )
        moved = (
            2 * shape.kv_heads * count * shape.dim * shape.dtype.itemsize + weights[0].numel() * shape.dtype.itemsize
        )
        sets = [
            tuple(normal(shape, shape.kv_heads, count, shape.dim) for _ in range(2))
            for _ in range(max(1, min(4, int(4e9 // moved))))
        ]
        few = [x[:, :1024] for x in sets[0]]
        exact = gate_reference(*few, *weights, dtype=torch.float64)
        error = float((write_gate(*few, *weights).double() - exact).norm() / exact.norm())
        ms = graph_ms(lambda g, w=weights: write_gate(*g, *w), sets, shape.device)
        plain = median_ms(lambda s=sets, w=weights: gate_reference(*s[0], *w), shape.device)
        yield bytes_row("write_gate", f"{count:,}", ms, moved, bandwidth, torch_us=round(plain * 1e3, 1), error=error)


def gate_step_part(shape: Shape, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Time the write gates of a decode step, one layer's and all layers' in one call."""
    for layers in (1, shape.layers):
        scale = shape.dim**-0.5
        weights = (
            normal(shape, layers, shape.kv_heads, shape.hidden, 2 * shape.dim).float() * scale,
            *(normal(shape, layers, shape.kv_heads, shape.hidden).float() for _ in range(2)),
            normal(shape, layers, shape.kv_heads).float(),
        )
        keys = normal(shape, layers, 1, shape.kv_heads, shape.window, shape.dim)
        slots = torch.full((layers, 1, shape.kv_heads), shape.window // 2, dtype=torch.int32, device=shape.device)
        angles = normal(shape, layers, 4, shape.dim // 2).float()
        positions = torch.ones(1, dtype=torch.int32, device=shape.device)
        given = (keys, slots, angles.cos(), angles.sin(), positions)
        exact = gate_step_reference(*given, *weights, dtype=torch.float64)
        error = float((write_gate_step(*given, *weights).double() - exact).norm() / exact.norm())
        moved = sum(part.nbytes for part in weights)
        # What a step reads of a model lies in no cache.
        sets = [[part.clone() for part in weights] for _ in range(max(1, min(32, int(1e9 // moved))))]
        ms = graph_ms(lambda own, g=given: write_gate_step(*g, *own), sets, shape.device)
        yield bytes_row("write_gate_step", f"{layers} layers", ms, moved, bandwidth, error=error)


def shown(row: dict[str, Any]) -> str:
    """Put a row on one line."""
    if row["op"] == "vertical_slash":
        return (
            f"vertical_slash {row['length']:,}: {row['ms'].get(row['best'])} ms, {row.get('tflops')} TFLOP/s "
            f"({row['best']}), gather {row['gather_ms']} ms; dense {row['dense_ms']}; ratios {row.get('ratio')}, with "
            f"the gather {row.get('ratio_with_gather')}"
        )
    return " ".join(f"{key}={value}" for key, value in row.items())


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--lengths", help="lengths of prompts, 65536,200000,400000 by default")
    parser.add_argument("--admitted", type=float, default=0.25, help="share of positions admitted")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--keep", type=int, default=4, help="candidates timed at all lengths")
    parser.add_argument("--only", help="time the candidates whose names contain one of these, separated by commas")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--check", metavar="NAME", help="print the error of one candidate and end")
    options = parser.parse_args(arguments)
    if options.smoke and os.environ.get("TRITON_INTERPRET") != "1":
        print("error: --smoke needs TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    if not options.smoke and not torch.cuda.is_available():
        print("error: these kernels are measured on a CUDA GPU, and there is none; try --smoke", file=sys.stderr)
        return 2
    parts = options.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        print(f"error: no part is called {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    lengths = (40, 150) if options.smoke else (65536, 200000, 400000)
    if options.lengths:
        lengths = tuple(int(length) for length in options.lengths.split(","))
    sizes = (4, 2, 32, 20) if options.smoke else (32, 8, 128, 48)
    shape = Shape(
        *sizes, lengths, check_length=150 if options.smoke else 3000, window=12 if options.smoke else options.window,
        share=options.admitted, chunk=256 if options.smoke else CHUNK, device="cpu" if options.smoke else "cuda",
        dtype=torch.float16 if options.smoke else torch.bfloat16, layers=2 if options.smoke else 32,
    )  # fmt: skip
    torch.manual_seed(0)
    if options.check:
        print(check_candidate(options.check, shape))
        return 0
    names = [*TILINGS, OVER, FLASH_4]
    if options.only:
        names = [name for name in names if any(part in name for part in options.only.split(","))]
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__}
    bandwidth = None
    if not options.smoke:
        bandwidth = tools().copy_bandwidth()
        found = tools().environment() | {"copy_TBps": round(bandwidth / 1e12, 3)}
    print(json.dumps(found))
    found["rows"] = []
    made = {
        "vertical": lambda: vertical_part(shape, options.keep, names),
        "gather": lambda: gather_part(shape, bandwidth),
        "decode": lambda: decode_part(shape, bandwidth),
        "promote": lambda: promote_part(shape, bandwidth),
        "gate": lambda: gate_part(shape, bandwidth),
        "gate step": lambda: gate_step_part(shape, bandwidth),
    }
    for part in parts:
        for row in made[part]():
            found["rows"].append(row)
            print(shown(row), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
        if not options.smoke:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
