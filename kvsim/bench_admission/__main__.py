"""``python -m kvsim.bench_admission``."""

import sys

from kvsim.bench_admission.bench import main

sys.exit(main())
