"""Admissions compared at equal cache size; `kvsim.admission_quality.quality` says how."""
