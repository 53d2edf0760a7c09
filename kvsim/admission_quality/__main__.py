"""``python -m kvsim.admission_quality``."""

import sys

from kvsim.admission_quality.command import main

sys.exit(main())
