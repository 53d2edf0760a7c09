"""Prefill attention of admitted keys and a local window: the vertical-slash mask of write-gated attention."""

from kvsim_kernels.gather_admitted import Admitted, gather_admitted
from kvsim_kernels.merge_partials import merge_partials
from kvsim_kernels.vertical_slash.reference import vertical_slash_mask, vertical_slash_reference

__all__ = ["Admitted", "gather_admitted", "merge_partials", "vertical_slash_mask", "vertical_slash_reference"]
