"""Time every kernel at the shapes of decoding, in a CUDA graph, beside what PyTorch offers.

    PYTHONPATH=.:traces:kernels python kernels/benchmarks/kernels.py --check --out kernels_h200.json

Prints medians in microseconds, the bytes that must move, and the share of the copy bandwidth measured in the same run.
`--check` runs the kernels' tests first and measures nothing if one fails. Needs a CUDA GPU; CI has none.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from kvsim_kernels.attention_rows import attention_row as attention_row_reference
from kvsim_kernels.attention_rows.kernel import attention_row
from kvsim_kernels.compact import compact as compact_reference
from kvsim_kernels.compact.kernel import compact
from kvsim_kernels.decode_attention import decode_attention as decode_reference
from kvsim_kernels.decode_attention.kernel import decode_attention
from kvsim_kernels.key_scores import key_scores as key_reference
from kvsim_kernels.key_scores.kernel import key_scores
from kvsim_kernels.key_scores.reference import Kind
from kvsim_kernels.launch import SERIAL
from kvsim_kernels.linear import linear as linear_reference
from kvsim_kernels.linear.kernel import linear
from kvsim_kernels.rope_write.kernel import rope_write
from kvsim_kernels.score_update import score_update as score_reference
from kvsim_kernels.score_update.kernel import score_update
from kvsim_kernels.select import select_evicted as evicted_reference
from kvsim_kernels.select import select_survivors as survivors_reference
from kvsim_kernels.select.kernel import select_evicted, select_survivors
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

ROOT = Path(__file__).resolve().parents[2]
CONTEXTS = (6400, 16384, 65536)
BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class Model:
    """Shapes of a model."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    vocabulary: int


MODELS = (
    Model("Llama-3.1-8B", 32, 32, 8, 128, 4096, 14336, 128256),
    Model("Qwen2.5-7B", 28, 28, 4, 128, 3584, 18944, 152064),
)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    `sets` makes that many sets of inputs for `ours` and `theirs`, so that none is found in the cache of the GPU.
    `apart` is the relative error of `ours` on one of them, or 0 or 1 for what must be equal.
    """

    op: str
    shape: str
    bytes: int
    sets: Callable[[int], list[Any]]
    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]
    beside: str
    apart: Callable[[Any], float]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def differ(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """Give 0 if all tensors are equal, else 1."""
    return float(any(not torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)))


def attention_cases(model: Model, contexts: tuple[int, ...], device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode attention with and without logits, and one row of probabilities."""
    heads, kv_heads, dim = model.heads, model.kv_heads, model.dim
    for n in contexts:
        lengths = torch.tensor([n], dtype=torch.int32, device=device)

        def sets(count: int, n: int = n) -> list[Any]:
            made = []
            for _ in range(count):
                keys, values = (torch.randn(1, kv_heads, n, dim, dtype=dtype, device=device) for _ in range(2))
                made.append((torch.randn(1, heads, dim, dtype=dtype, device=device), keys, values))
            return made

        def sdpa(given: Any) -> torch.Tensor:
            query, keys, values = given
            return scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

        def scored(given: Any) -> Any:
            query, keys, _ = given
            logits = torch.matmul(query.view(1, kv_heads, -1, dim), keys.transpose(2, 3)) * dim**-0.5
            return sdpa(given), torch.softmax(logits, -1, dtype=torch.float32).mean((1, 2))

        def apart(given: Any, lengths: torch.Tensor = lengths) -> float:
            return error(
                decode_attention(*given, lengths).output, decode_reference(*given, lengths, dtype=torch.float64).output
            )

        cache, logits = 4 * n * kv_heads * dim, 4 * n * heads
        shape = f"{model.name} {n:,}"
        yield Case(
            "decode_attention", shape, cache, sets, lambda g, m=lengths: decode_attention(*g, m), sdpa, "SDPA", apart
        )
        yield Case(
            "decode_attention+logits", shape, cache + logits, sets,
            lambda g, m=lengths: decode_attention(*g, m, with_logits=True), scored, "SDPA, softmax, mean", apart,
        )  # fmt: skip
        yield Case(
            "attention_rows", shape, cache // 2 + logits, sets, lambda g: attention_row(g[0][0], g[1][0]),
            lambda g: attention_row_reference(g[0][0], g[1][0]), "torch float32",
            lambda g: error(
                attention_row(g[0][0], g[1][0]), attention_row_reference(g[0][0], g[1][0], dtype=torch.float64)
            ),
        )  # fmt: skip


def score_cases(model: Model, contexts: tuple[int, ...], device: str) -> Iterator[Case]:
    """All layers of a step in one call: plain, and with both weightings."""
    for n in contexts:
        lengths = torch.tensor([n], dtype=torch.int32, device=device)
        a, b = torch.full((2, model.layers), 0.5, device=device)

        def sets(count: int, n: int = n) -> list[Any]:
            made = []
            for _ in range(count):
                logits = torch.randn(model.layers, 1, model.heads, n, device=device)
                norms = torch.rand(model.layers, 1, model.kv_heads, n, device=device)
                made.append((torch.zeros(1, 1, n, device=device), logits, torch.logsumexp(logits, -1), norms))
            return made

        def torches(given: Any, a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            state, logits, lse, _ = given
            for layer in range(model.layers):
                scores = torch.exp(logits[layer] - lse[layer].unsqueeze(-1)).mean(1, keepdim=True)
                state.mul_(a[layer]).add_(scores * b[layer])

        def update(given: Any, weighted: bool, m: torch.Tensor = lengths, a: torch.Tensor = a) -> torch.Tensor:
            more = {"value_norms": given[3], "entropy": True} if weighted else {}
            score_update(*given[:3], m, a, a, **more)
            return given[0]

        def apart(given: Any, weighted: bool, m: torch.Tensor = lengths, a: torch.Tensor = a) -> float:
            more = {"value_norms": given[3], "entropy": True} if weighted else {}
            exact = given[0].double()
            score_reference(exact, given[1], torch.logsumexp(given[1].double(), -1), m, a, a, **more)
            return error(update(given, weighted, m, a), exact)

        moved = 4 * n * model.heads * model.layers
        for weighted in (False, True):
            yield Case(
                "score_update" + ("+vnorm+entropy" if weighted else ""), f"{model.name} {n:,} x {model.layers} layers",
                # Norms take two more reads of the logits.
                moved + (moved + 2 * 4 * n * model.kv_heads * model.layers if weighted else 0), sets,
                lambda g, w=weighted, u=update: u(g, w), torches, "torch, plain score",
                lambda g, w=weighted, u=apart: u(g, w),
            )  # fmt: skip


def select_cases(contexts: tuple[int, ...], device: str, groups: tuple[int, ...]) -> Iterator[Case]:
    """Select for the first cut to 10%, and for one in, one out."""
    for n in contexts:
        for count in groups:
            budget = max(64, n // 10)
            last = torch.tensor([n - 1], dtype=torch.int32, device=device)

            def sets(number: int, n: int = n, count: int = count) -> list[Any]:
                at = torch.arange(n, dtype=torch.int32, device=device).view(1, 1, n)
                return [(torch.rand(1, count, n, device=device), at) for _ in range(number)]

            def limited(kept: int, count: int = count) -> torch.Tensor:
                return torch.tensor([kept, 4, 32], dtype=torch.int32, device=device).expand(1, count, 3).contiguous()

            first, steady, used = limited(budget), limited(n - 1), last + 1
            yield Case(
                "select_survivors", f"{count} x {n:,} to {budget:,}", 4 * n * (count + 1), sets,
                lambda g, f=first, u=used, p=last, w=budget: select_survivors(*g, u, f, p, width=w, ordered=True),
                lambda g, w=budget: torch.topk(g[0], w, sorted=False).indices.sort().values, "torch.topk, sort",
                lambda g, f=first, u=used, p=last, w=budget: differ(
                    select_survivors(*g, u, f, p, width=w), survivors_reference(*g, u, f, p, width=w)
                ),
            )  # fmt: skip
            yield Case(
                "select_evicted", f"{count} x {n:,}", 4 * n * (count + 1), sets,
                lambda g, f=steady, u=used, p=last: select_evicted(*g, u, f, p),
                lambda g: torch.argmin(g[0], -1), "torch.argmin",
                lambda g, f=steady, u=used, p=last: differ(
                    select_evicted(*g, u, f, p), evicted_reference(*g, u, f, p)
                ),
            )  # fmt: skip


def compact_cases(model: Model, contexts: tuple[int, ...], device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cut a layer's cache to 10%."""
    for n in contexts:
        budget = max(1, n // 10)

        def sets(count: int, n: int = n, budget: int = budget) -> list[Any]:
            slots = torch.randperm(n, device=device)[:budget].sort().values.int().view(1, 1, -1)
            shape = 1, model.kv_heads, n, model.dim
            return [
                (*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)), slots, slots[0, 0].long())
                for _ in range(count)
            ]

        yield Case(
            "compact", f"{model.name} {n:,} to {budget:,}", 8 * budget * model.kv_heads * model.dim, sets,
            lambda g, w=budget: compact(*g[:3], width=w + 1),
            lambda g: (g[0].index_select(2, g[3]), g[1].index_select(2, g[3])), "torch.index_select",
            lambda g: differ(compact(*g[:3]), compact_reference(*g[:3])),
        )  # fmt: skip


def key_cases(model: Model, contexts: tuple[int, ...], device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Score a layer's keys by their distance from their mean, and by their norm."""
    for n in contexts:
        lengths = torch.tensor([n], dtype=torch.int32, device=device)

        def sets(count: int, n: int = n) -> list[Any]:
            shape = 1, model.kv_heads, n, model.dim
            return [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]

        def cosine(keys: torch.Tensor) -> torch.Tensor:
            unit = torch.nn.functional.normalize(keys.float(), dim=-1)
            return -torch.nn.functional.cosine_similarity(unit, unit.mean(2, keepdim=True), dim=-1)

        kinds: tuple[tuple[Kind, int, Callable[[Any], Any]], ...] = ("cosine", 2, cosine), ("norm", 1, torch_norm)
        for kind, reads, torches in kinds:
            yield Case(
                f"key_scores {kind}", f"{model.name} {n:,}", reads * 2 * n * model.kv_heads * model.dim, sets,
                lambda g, m=lengths, k=kind: key_scores(g, m, k), torches, "torch float32",
                lambda g, m=lengths, k=kind: error(
                    key_scores(g, m, k), key_reference(g, m, k, dtype=torch.float64)
                ),
            )  # fmt: skip


def torch_norm(keys: torch.Tensor) -> torch.Tensor:
    """Norms of keys by PyTorch."""
    return keys.float().norm(dim=-1)


def linear_cases(
    model: Model, device: str, dtype: torch.dtype, batches: tuple[int, ...] = (1, 4, 16)
) -> Iterator[Case]:
    """Multiply as a decode step does."""
    hidden, keys = model.hidden, model.kv_heads * model.dim
    shapes = (
        ("key", keys, hidden, "norm"),
        ("query, key, value", model.heads * model.dim + 2 * keys, hidden, "norm"),
        ("output", hidden, model.heads * model.dim, "residual"),
        ("gate, up", model.intermediate, hidden, "norm+up"),
        ("down", hidden, model.intermediate, "residual"),
        ("vocabulary", model.vocabulary, hidden, "norm"),
    )
    for batch in batches:
        for name, height, width, kind in shapes:

            def sets(count: int, batch: int = batch, height: int = height, width: int = width, kind: str = kind) -> Any:
                made = []
                for _ in range(count):
                    options = {}
                    if "norm" in kind:
                        options["norm_weight"] = torch.rand(width, dtype=dtype, device=device)
                    if "up" in kind:
                        options["up_weight"] = torch.randn(height, width, dtype=dtype, device=device) * width**-0.5
                    if "residual" in kind:
                        options["residual"] = torch.randn(batch, height, dtype=dtype, device=device)
                    weight = torch.randn(height, width, dtype=dtype, device=device) * width**-0.5
                    made.append((torch.randn(batch, width, dtype=dtype, device=device), weight, options))
                return made

            def torches(given: Any) -> torch.Tensor:
                x, weight, options = given
                if "norm_weight" in options:
                    x = rms_norm(x, (x.shape[1],), options["norm_weight"], 1e-6)
                y = torch_linear(x, weight)
                if "up_weight" in options:
                    y = silu(y) * torch_linear(x, options["up_weight"])
                return y + options["residual"] if "residual" in options else y

            yield Case(
                "linear", f"{model.name} {name} {batch} x {height:,} x {width:,}",
                2 * height * width * (2 if "up" in kind else 1), sets, lambda g: linear(g[0], g[1], **g[2]), torches,
                "cuBLAS", lambda g: error(linear(g[0], g[1], **g[2]), linear_reference(g[0], g[1], **g[2])),
            )  # fmt: skip


def launch_cases(model: Model, contexts: tuple[int, ...], device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Run a layer of a decode step with kernels that start early or not, and products in full waves or as they come."""
    hidden, dim, heads, kv_heads = model.hidden, model.dim, model.heads, model.kv_heads
    sizes = heads * dim, kv_heads * dim, kv_heads * dim

    def weights(count: int) -> list[Any]:
        shapes = (
            (sum(sizes), hidden),
            (hidden, heads * dim),
            (2 * model.intermediate, hidden),
            (hidden, model.intermediate),
        )
        return [
            [torch.randn(shape, dtype=dtype, device=device) * shape[1] ** -0.5 for shape in shapes]
            for _ in range(count)
        ]

    norm = torch.rand(hidden, dtype=dtype, device=device)
    table = torch.rand(1, dim, dtype=dtype, device=device)
    at = torch.zeros(1, dtype=torch.int32, device=device)
    for n in contexts:
        lengths = torch.tensor([n], dtype=torch.int32, device=device)

        def sets(count: int, n: int = n) -> list[Any]:
            caches = [torch.randn(2, 1, kv_heads, n, dim, dtype=dtype, device=device) for _ in range(count)]
            return [
                (torch.randn(1, hidden, dtype=dtype, device=device), *own, cache)
                for own, cache in zip(weights(count), caches, strict=True)
            ]

        def layer(given: Any, lengths: torch.Tensor = lengths) -> torch.Tensor:
            x, joined, output, both, down, (keys, values) = given
            query, key, value = (part.view(1, -1, dim) for part in linear(x, joined, norm_weight=norm).split(sizes, 1))
            turned = rope_write(
                key, value, keys, values, at.view(1, 1), query=query, cos=table, sin=table, positions=at
            )
            found = decode_attention(turned, keys, values, lengths, with_logits=True).output
            x = linear(found.view(1, -1), output, residual=x)
            wide = linear(x, both[: model.intermediate], norm_weight=norm, up_weight=both[model.intermediate :])
            return linear(wide, down, residual=x)

        moved = 2 * hidden * (sum(sizes) + heads * dim + 3 * model.intermediate) + 4 * n * kv_heads * dim
        yield Case(
            "decode_layer", f"{model.name} {n:,}", moved, sets, layer, lambda g, run=layer: serially(run, g),
            "one kernel after the other", lambda g, run=layer: error(run(g), serially(run, g).double()),
        )  # fmt: skip
    for name, height, width, before in (
        ("query, key, value", sum(sizes), hidden, (4, None)), ("output", hidden, heads * dim, (4, None)),
        ("down", hidden, model.intermediate, (4, None)),
    ):  # fmt: skip
        options = {"norm_weight": norm} if name.startswith("query") else {}
        yield Case(
            "linear_plan", f"{model.name} {name} 1 x {height:,} x {width:,}", 2 * height * width,
            lambda count, h=height, w=width: [
                (torch.randn(1, w, dtype=dtype, device=device), torch.randn(h, w, dtype=dtype, device=device))
                for _ in range(count)
            ],
            lambda g, o=options: linear(*g, **o), lambda g, o=options, b=before: linear(*g, plan=b, **o),
            "4 rows, as many as fit",
            lambda g, o=options, b=before: error(linear(*g, **o), linear(*g, plan=b, **o)),
        )  # fmt: skip


def serially(call: Callable[[Any], torch.Tensor], given: Any) -> torch.Tensor:
    """Have every kernel of a call wait for the one before it."""
    os.environ[SERIAL] = "1"
    try:
        return call(given)
    finally:
        del os.environ[SERIAL]


def all_cases(
    models: tuple[Model, ...],
    contexts: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
    groups: tuple[int, ...] = (1, 256),
) -> Iterator[Case]:
    """Every row of the table."""
    for model in models:
        yield from attention_cases(model, contexts, device, dtype)
        yield from score_cases(model, contexts, device)
        yield from compact_cases(model, contexts, device, dtype)
        yield from key_cases(model, contexts, device, dtype)
        yield from linear_cases(model, device, dtype)
        yield from launch_cases(model, contexts, device, dtype)
    yield from select_cases(contexts, device, groups)


def median_us(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call, in microseconds."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times)[repeats // 2]


def graphed_us(call: Callable[[Any], Any], sets: list[Any]) -> float:
    """Median time of one call, in microseconds, out of a graph that calls it on every set of inputs in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for given in sets[:2]:
            call(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in sets:
            call(given)
    return median_us(graph.replay) / len(sets)


def copy_bandwidth() -> float:
    """Bytes per second that a copy of 4 GiB reads and writes."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source)) * 1e6


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """Time a case, having looked at what it computes."""
    sets = case.sets(max(2, min(32, int(4e9 // max(1, case.bytes)))))
    apart = case.apart(sets[0])
    ours, theirs = graphed_us(case.ours, sets), graphed_us(case.theirs, sets)
    return {
        "op": case.op,
        "shape": case.shape,
        "us": round(ours, 2),
        "bytes": case.bytes,
        "bandwidth_share": round(case.bytes / ours * 1e6 / bandwidth, 4),
        "beside": case.beside,
        "beside_us": round(theirs, 2),
        "error": apart,
    }


def environment() -> dict[str, Any]:
    """Say what the numbers depend on."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "command": " ".join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def run_tests() -> bool:
    """Run the kernels' tests, and none of the project's others; side by side, for most of the time is compilation."""
    folder = ROOT / "tests/kernels"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(ROOT)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-o", f"pythonpath={ROOT / 'tests/shared'}"]
    command += ["--confcutdir", str(folder)]
    parts = sorted(path for path in folder.iterdir() if list(path.glob("test_*.py")) or path.match("test_*.py"))
    running = [
        subprocess.Popen([*command, str(part)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for part in parts
    ]
    for part, process in zip(parts, running, strict=True):
        said = process.communicate()[0].strip().split("\n")
        print(
            f"{part.name}: {said[-1]}" if process.returncode == 0 else "\n".join([f"{part.name}:", *said]), flush=True
        )
    return all(process.returncode == 0 for process in running)


def main() -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--check", action="store_true", help="run the kernels' tests first")
    parser.add_argument("--only", help="measure the operations whose name starts like this")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="slots of the cache")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: these kernels are measured on a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    if options.check and not run_tests():
        print("error: a test failed, so nothing is measured", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    found = environment() | {"copy_TBps": round(bandwidth / 1e12, 3), "rows": []}
    print(json.dumps({key: value for key, value in found.items() if key != "rows"}))
    print(f"{'op':26} {'shape':44} {'us':>8} {'MB':>8} {'share':>6} {'torch us':>9}  beside, error")
    for case in all_cases(MODELS, tuple(options.contexts), "cuda", torch.bfloat16):
        if options.only and not case.op.startswith(options.only):
            continue
        row = measure(case, bandwidth)
        found["rows"].append(row)
        print(
            f"{row['op']:26} {row['shape']:44} {row['us']:8.1f} {row['bytes'] / 1e6:8.1f} "
            f"{row['bandwidth_share']:6.1%} {row['beside_us']:9.1f}  {row['beside']}, {row['error']:.1e}",
            flush=True,
        )
        torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
