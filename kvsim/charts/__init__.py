"""Charts of everything kvsim measures, in Altair; the explorer, the notebooks and ``kvsim chart`` draw these.

Each function takes results, rows of numbers (dicts, objects with a ``summary()``) or polars frames, and gives a chart
that holds at most 5,000 rows of data: what is more is aggregated first, and the axis says how. Equal input makes equal
charts.

>>> import kvsim, kvsim.charts
>>> result = kvsim.replay("traces/samples/smollm2-needle-512", "ema:0.8")  # doctest: +SKIP
>>> kvsim.charts.retention(result).save("retention.html")  # doctest: +SKIP
"""

from kvsim.charts.attending import attention_received
from kvsim.charts.bars import decode_composition, tradeoff
from kvsim.charts.curves import alpha_sensitivity, budget_curves, quality_by_size, quality_cost
from kvsim.charts.files import save
from kvsim.charts.grids import needle_grid
from kvsim.charts.growth import cache_growth, eviction_triggers
from kvsim.charts.heads import kept_by_head, mass_by_layer
from kvsim.charts.lines import attended_pairs, churn, kept_mass, timeline
from kvsim.charts.loops import fidelity, prediction
from kvsim.charts.maps import (
    evictions,
    reference_utility,
    retained_shares,
    retention,
    retention_overview,
    retention_rows,
)
from kvsim.charts.notebook import in_notebooks
from kvsim.charts.optimum import oracle_gap, oracle_gap_rows
from kvsim.charts.overlap import jaccard
from kvsim.charts.pairs import rank_stability
from kvsim.charts.rules import memory_weights, two_tokens
from kvsim.charts.scorers import scorer_spectrum
from kvsim.charts.utility import utility_of_tokens

__all__ = [
    "alpha_sensitivity",
    "attended_pairs",
    "attention_received",
    "budget_curves",
    "cache_growth",
    "churn",
    "decode_composition",
    "eviction_triggers",
    "evictions",
    "fidelity",
    "in_notebooks",
    "jaccard",
    "kept_by_head",
    "kept_mass",
    "mass_by_layer",
    "memory_weights",
    "needle_grid",
    "oracle_gap",
    "oracle_gap_rows",
    "prediction",
    "quality_by_size",
    "quality_cost",
    "rank_stability",
    "reference_utility",
    "retained_shares",
    "retention",
    "retention_overview",
    "retention_rows",
    "save",
    "scorer_spectrum",
    "timeline",
    "tradeoff",
    "two_tokens",
    "utility_of_tokens",
]
