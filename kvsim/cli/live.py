"""``kvsim live``."""

from typing import Annotated, Any

import typer

from kvsim.cli.folding import PolicyText
from kvsim.cli.models import Chat, Device, Dtype, Force, ModelPath, Prompt, encode, load, need_torch, read_text
from kvsim.cli.options import AsJson, BudgetText, CompressionRatio, PolicyTexts, Quiet, budget_note
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say, stderr
from kvsim.errors import KvsimError, unknown_name
from kvsim.policy import parse
from kvsim.replay import choose_budget

__all__ = ["live"]

ENGINES = ("plain", "triton")
ATTENTIONS = ("triton", "sdpa", "flash_attn")

MEASURED = {
    "kept_mass": "kept\nmass",
    "churn": "churn",
    "raw_agreement": "raw\nagreem.",
    "output_error": "output\nerror",
}


def live(
    model: ModelPath,
    prompt: Prompt,
    policy: PolicyTexts,
    steps: Annotated[int, typer.Option(help="The most tokens to decode.")] = 64,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    chat: Chat = False,
    force: Force = None,
    physical: Annotated[
        bool, typer.Option("--physical", help="Remove evicted keys and values from memory instead of masking them.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    engine: Annotated[
        str, typer.Option(help="plain: the reference. triton: kernels on a CUDA GPU, evicted keys always removed.")
    ] = "plain",
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Attention of --engine triton: triton, sdpa or flash_attn. The others read keys twice to score them.",
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decode a prompt under policies in a real model, token by token, and print what each one wrote and held.

    The prompt is read once, and once more for each admission (the admit= of a policy acts on the prompt too); all
    policies decode in one batch, or one after the other with --physical, so that memory is a policy's own. "evicted"
    counts positions over all of a policy's sets.

    Example: kvsim live --model SmolLM2-135M-Instruct --prompt question.txt --chat --policy full --policy ema:0.9
    """
    need_torch("live decoding", "live")
    if steps < 1:
        raise KvsimError(f"--steps must be at least 1, got {steps}")
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if attention is not None and engine != "triton":
        raise KvsimError("--attention is a choice of --engine triton")
    if attention is not None and attention not in ATTENTIONS:
        raise unknown_name("attention", attention, ATTENTIONS)
    physical = physical or engine == "triton"
    policies = [parse(text) for text in policy]
    chosen = choose_budget(compression_ratio, budget)
    text = read_text(prompt, "--prompt")
    forced_text = read_text(str(force), "--force") if force is not None else None
    if engine == "triton":
        _check_gpu(device)
    network, tokenizer = load(model, dtype=dtype, device=device, quiet=quiet or as_json)

    from kvsim.live import LiveRun, decode, prefill_under

    forced = None if forced_text is None else tokenizer(forced_text, add_special_tokens=False).input_ids
    asked = [one.with_budget(chosen) for one in policies]
    prefixes = prefill_under(network, encode(tokenizer, text, chat=chat), asked)
    if engine == "triton":
        from kvsim.live.fast.rules import draw_up

        for one, prefix in zip(asked, prefixes, strict=True):
            draw_up([one], [prefix], steps)
    _warn_of_length(network, prefixes[0].length, steps if forced is None else min(steps, len(forced)))
    rows_asked = list(zip(prefixes, asked, strict=True))
    # A batch takes the memory of its fullest row: each policy is to show its own.
    batches = [[one] for one in rows_asked] if physical else [rows_asked]
    runs: list[LiveRun] = []
    for batch in batches:
        with progress_bar("decoding", quiet=quiet or as_json) as advance:
            runs += decode(
                network,
                [prefix for prefix, _ in batch],
                [one for _, one in batch],
                steps=steps,
                force=forced,
                physical=physical,
                temperature=temperature,
                seed=seed,
                stop=_stops(network, tokenizer),
                progress=advance,
                engine=engine,
                attention=attention,
            )
    rows: list[dict[str, Any]] = []
    for run in runs:
        measured = {} if physical else run.result().summary()
        rows.append(
            measured
            | {
                "policy": run.policy,
                "steps": len(run.tokens),
                "text": tokenizer.decode(run.tokens, skip_special_tokens=True),
                "tokens": run.tokens,
                "evictions": run.evictions,
                "near_ties": run.near_ties,
                "logical_bytes": run.logical_bytes,
                "physical_bytes": run.physical_bytes,
                "full_bytes": run.full_bytes,
                "physical": physical,
                "engine": run.engine,
                "loop": "live",
            }
            | ({} if run.allocated_bytes is None else {"allocated_bytes": list(run.allocated_bytes)})
            | ({} if run.attention is None else {"attention": run.attention})
        )
    if as_json:
        print_json({"prompt_length": prefixes[0].length, "results": rows})
        return
    table = narrow_table("policy")
    shown = [] if physical else [name for name in MEASURED if any(row[name] is not None for row in rows)]
    for name in [
        "steps",
        *(MEASURED[name] for name in shown),
        "evicted,\nall sets",
        "KV held\nMB",
        "in memory\nMB",
        "full\nMB",
    ]:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for one, row in zip(policies, rows, strict=True):
        sizes = [f"{row[name] / 1e6:.2f}" for name in ("logical_bytes", "physical_bytes", "full_bytes")]
        numbers = ["-" if row[name] is None else f"{row[name]:.3f}" for name in shown]
        table.add_row(PolicyText(str(one)), str(row["steps"]), *numbers, str(row["evictions"]), *sizes)
    print_table(table)
    for one, row in zip(policies, rows, strict=True):
        say(f"{one}: {' '.join(row['text'].split())}")
    for one, run in zip(policies, runs, strict=True):
        if run.allocated_bytes is not None:
            before, after = (f"{size / 1e6:.2f}" for size in run.allocated_bytes)
            say(f"{one}: {before} MB allocated before the first step, {after} MB after it; {run.near_ties} near-ties")
    kind = "evicted keys removed" if physical else "evicted keys masked"
    way = "live" if engine == "plain" else f"live, engine {engine}"
    way += "" if attention is None else f", attention {attention}"
    say(f"{way}; prompt {prefixes[0].length} tokens; {kind}; {budget_note(chosen)}")


def _check_gpu(device: str | None) -> None:
    """Say that there is no GPU before a model is loaded."""
    import torch

    from kvsim.live.fast.decode import check_machine

    check_machine(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


def _warn_of_length(model: Any, prompt: int, steps: int) -> None:
    """Say that there are more positions than a model is made for."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and prompt + steps > most:
        say(
            f"kvsim: warning: a prompt of {prompt} tokens and {steps} steps reach beyond the {most} positions that the "
            "model is made for",
            to=stderr,
        )


def _stops(model: Any, tokenizer: Any) -> list[int]:
    from kvsim_traces.recorder import eos_tokens

    return eos_tokens(model, tokenizer)
