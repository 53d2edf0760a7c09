"""Sizes and losses of admissions in a running model, and the smoke test on a bare machine."""

import subprocess
import sys

import pytest
from gates import gate_for
from recording import VOCAB, tiny

import kvsim
from kvsim.admission_quality.families import Families
from kvsim.admission_quality.texts import LiveTexts
from kvsim.errors import KvsimError
from kvsim.live import prefill
from kvsim.retrieval_heads import save_heads

TEXTS = [[(5 * i * i + 3 * i + shift) % VOCAB for i in range(length)] for shift, length in ((1, 40), (2, 40), (3, 34))]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("live"), tiny("llama-gqa3")
    gate = gate_for(prefill(model, [0]), folder / "gate.safetensors")
    scores = [[0, 1], [2, 3], [4, 5]]
    heads = {"model": "tiny", "num_layers": 3, "num_kv_heads": 2, "scores": scores, "threshold": 4}
    save_heads(heads, folder / "heads.json")
    return LiveTexts(model, TEXTS, 20), Families((gate,), str(folder / "heads.json"), 4, 2, 0, 40, 0.02)


@pytest.mark.parametrize(
    "admit", ["local:window=7,sink=3", "duo:HEADS,window=4,sink=2,share=0.4", "random:0.3,window=5"]
)
def test_sizes_that_need_no_model_are_those_of_the_pass(admit, places):
    texts, families = places
    policy = kvsim.parse(f"full/admit={admit.replace('HEADS', families.heads)}")
    measured = texts.measure([policy])[0]
    assert texts.size(policy) == pytest.approx(sum(one.cache_share for one in measured) / 3, rel=1e-9)


@pytest.mark.parametrize("name", ["wgkv", "random"])
def test_matching(name, places):
    texts, families = places
    found = families.match(name, 0.5, texts.size)
    assert abs(found.size / 0.5 - 1) <= 0.02
    assert found.size == pytest.approx(sum(one.cache_share for one in texts.measure([found.policy])[0]) / 3, rel=1e-9)


def test_texts_are_needed():
    with pytest.raises(KvsimError, match="there are no texts"):
        LiveTexts(None, [], 4)


@pytest.mark.slow
def test_the_smoke_test_runs_without_what_a_bare_machine_lacks(tmp_path):
    code = (
        "import sys\n"
        "for name in ('polars', 'altair', 'typer', 'rich'): sys.modules[name] = None\n"
        "from kvsim.admission_quality.command import main\n"
        f"sys.exit(main(['--smoke', '--out', {str(tmp_path / 'q.json')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "live at 50%, loss: wgkv" in done.stdout
    assert "NaN" not in (tmp_path / "q.json").read_text()
