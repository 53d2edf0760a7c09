"""Training what admission goes by: the write gates of WG-KV, and the heads of DuoAttention; needs torch."""
