"""``kvsim loss``."""

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.folding import PolicyText
from kvsim.cli.models import Device, Dtype, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, BudgetText, CompressionRatio, PolicyTexts, Quiet, budget_note
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.policy import parse
from kvsim.replay import choose_budget

__all__ = ["loss"]


def loss(
    model: ModelPath,
    data: Annotated[Path, typer.Option(metavar="FILE", help=".txt, or .jsonl with a 'text' on each line.")],
    policy: PolicyTexts,
    length: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of a text.")] = 4096,
    prefill: Annotated[int, typer.Option(metavar="TOKENS", help="How many of them are its prompt.")] = 2048,
    texts: Annotated[int, typer.Option(metavar="N", help="The most texts to take.")] = 8,
    skip: Annotated[int, typer.Option(metavar="N", help="Texts to pass over, such as those trained on.")] = 0,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    step_by_step: Annotated[
        bool, typer.Option("--step-by-step", help="Decode even where one masked pass is the same.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the intervals.")] = 0,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure the next-token loss of held-out text under policies, live, and how much of the cache its queries saw.

    The prompt is read under the policy's admission; the rest is forced, in one masked pass where the policy admits and
    does no more, else token by token. The first policy is the baseline of the differences, paired by text, with 95%
    bootstrap intervals.

    Example: kvsim loss --model SmolLM2-135M --data held-out.jsonl --policy full --policy full/admit=local:window=256
    """
    need_torch("a loss", "live")
    policies = [parse(text) for text in policy]
    chosen = choose_budget(compression_ratio, budget)
    network, tokenizer = load(model, dtype=dtype, device=device, quiet=quiet or as_json)

    from kvsim.text_loss_command import measure

    with progress_bar("measuring", quiet=quiet or as_json) as advance:
        report = measure(
            network,
            tokenizer,
            data,
            policies,
            length=length,
            prefill=prefill,
            texts=texts,
            skip=skip,
            compression_ratio=compression_ratio,
            budget=budget,
            one_pass=not step_by_step,
            seed=seed,
            progress=advance,
        )
    if as_json:
        print_json(report)
        return
    table = narrow_table("policy")
    for name in ("loss", "perplexity", "cache\ntokens", "cache\nshare", "minus\nfirst", "95%"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for one, row in zip(policies, report["results"], strict=True):
        other = row["against_first"]
        delta = "-" if other is None else f"{other['delta']:+.4f}"
        spread = "-" if other is None or other["low"] is None else f"{other['low']:+.4f} {other['high']:+.4f}"
        table.add_row(
            PolicyText(str(one)), f"{row['loss']:.4f}", f"{row['perplexity']:.2f}", f"{row['cache_tokens']:.0f}",
            f"{row['cache_share']:.3f}", delta, spread,
        )  # fmt: skip
    print_table(table)
    say(
        f"live; {report['texts']} texts of {length} tokens, the first {prefill} a prompt; loss: nats a token; "
        f"cache: what a query sees, mean over steps and heads; {budget_note(chosen)}"
    )
