"""The recorder's kernel runs on a GPU where there is one, and in Triton's interpreter elsewhere."""

import os
from pathlib import Path

# Triton reads this when it is imported, which Transformers does.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Triton 3.9 warns where this is not said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
