"""Time the GPU engine beside the Numba engine on two cores: `kvsim.bench_replay`, run from a checkout.

    python kernels/benchmarks/replay_engine.py --out replay_engine.json

Not a test: CI has no GPU. Every policy that the Numba engine runs is compared, and a difference fails the benchmark.
"""

import sys

from kvsim.bench_replay import main

if __name__ == "__main__":
    sys.exit(main())
