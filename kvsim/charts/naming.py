"""What charts call the columns of results: a title, and the text of an axis with its unit."""

import dataclasses

from kvsim.errors import KvsimError
from kvsim.intervals import alpha_family
from kvsim.policy import parse

__all__ = ["family_of", "name_of", "without_budget"]

NAMES = {
    "kept_mass": ("Kept mass", "kept mass (share of a query's attention)"),
    "kept_fraction": ("Kept fraction", "kept fraction (share of the positions so far)"),
    "churn": ("Churn of the retained set", "churn (1 − Jaccard with the step before)"),
    "shadow_churn": ("Churn without eviction", "shadow churn (1 − Jaccard with the step before)"),
    "raw_churn": ("Churn of the raw top-B", "raw churn (1 − Jaccard with the step before)"),
    "raw_agreement": ("Agreement with the raw top-B", "raw agreement (Jaccard)"),
    "raw_top_evicted": ("Raw top-B that is not retained", "raw-top evicted (share of the raw top-B)"),
    "newest_kept": ("Newest token kept", "share of groups that keep the step's own token"),
    "newest_wronged": ("Newest token evicted though in the raw top-B", "share of groups"),
    "ties": ("Ties at the cut", "tied positions (tokens)"),
    "retained": ("Tokens retained", "tokens retained, mean over groups"),
    "output_error": ("Output error", "relative error of the attention output"),
    "oracle_gap": ("Oracle gap", "oracle gap (1 − kept mass / optimum)"),
    "budget": ("Budget", "budget B (tokens a group)"),
    "keep_ratio": ("Budget", "budget (share of the prompt kept)"),
    "compression_ratio": ("Compression", "compression ratio (share of the prompt removed)"),
    "kv_bytes": ("Memory", "keys and values retained at the end (bytes)"),
    "cache_size": ("Cache size", "cache size (share of the full cache, mean over steps and heads)"),
    "removed_of_seen": ("Removed", "share of all positions seen that was evicted"),
    "budget_of_mean_length": ("Budget", "budget over mean sequence length"),
    "layer": ("Layer error", "loss: wrong layers trusted"),
    "lag": ("Lag error", "loss: stale because of memory"),
    "boundary": ("Boundary error", "loss: flips caused by noise"),
    "total": ("Total loss", "loss of local utility"),
    "survival": ("Needles held", "share of the asked values' tokens still held"),
    "score": ("Score", "score"),
    "rouge_l_f": ("ROUGE-L F", "ROUGE-L F"),
    "accuracy": ("Accuracy", "accuracy (share answered right)"),
    "tokens_per_second": ("Throughput", "decode throughput (tokens/s)"),
    "milliseconds": ("Time", "time (ms a token)"),
}


def name_of(column: str) -> tuple[str, str]:
    """Give the title and the axis text of a column; a column that kvsim does not know keeps its name."""
    plain = column.replace("_", " ")
    return NAMES.get(column, (plain[:1].upper() + plain[1:], plain))


def without_budget(policy: str) -> str:
    """Give a policy string without its budget; text that is no policy stays as it is."""
    try:
        return str(dataclasses.replace(parse(policy), budget=None))
    except KvsimError:
        return policy


def family_of(policy: str) -> tuple[str, float | None]:
    """Split a policy string into its rule, with ``alpha`` for the number, and its alpha, None for rules without one."""
    try:
        found = alpha_family(parse(policy))
    except KvsimError:
        found = None
    return (policy, None) if found is None else found
