"""What tests of fast live decoding have in common."""

import fast_cases as fc
import numpy as np
import pytest

from kvsim.live import prefill


@pytest.fixture
def quiet_infinities():
    """Let the interpreter compute with infinities as a GPU does: NumPy warns where a GPU does not."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module")
def llama():
    """A small model."""
    return fc.small("llama-gqa3")


@pytest.fixture(scope="module")
def prefixes(llama):
    """Its prompts, of different lengths."""
    return [prefill(llama, prompt) for prompt in fc.PROMPTS]
