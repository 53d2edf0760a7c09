"""The text page: what the browser is given is what the library says; the URL restores the view."""

import base64
import itertools
import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from exploring import LONG, MULTI, NEEDLE, errors, open_page, said
from kvsim_traces import import_npz
from typer.testing import CliRunner

import kvsim
from kvsim.attending import attention_of, attention_on, shade
from kvsim.cli import app as cli
from kvsim.fates import fates_of, given_to
from kvsim.states import states_after
from kvsim.token_display import display


def given_to_browser(app):
    """Read what the two components were given: the static data, and what changes often."""
    found = {}
    for element in app.get("bidi_component"):
        proto = element.proto
        found[proto.component_name] = proto
    header, _, body = found["kvsim_tokens"].bytes.partition(b"\n")
    return json.loads(header), json.loads(body), json.loads(found["kvsim_tokens_live"].json)


def unpacked(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


def test_the_browser_is_given_the_replay():
    app = open_page("text", policy="tova/protect=sink:4+recent:8", budget="10%", group="layer 4", step="9")
    assert not errors(app)
    header, body, live = given_to_browser(app)
    trace = kvsim.open_trace(NEEDLE)
    result = kvsim.replay(trace, "tova/protect=sink:4+recent:8", budget="10%")
    fates = fates_of(result, 4)
    given = given_to(fates, trace)
    assert (header["group"], header["mode"], header["recording"]) == (4, "irreversible", trace.hash)
    assert body["label"] == "layer 4"
    starts, changes = unpacked(body["starts"], np.int32), unpacked(body["changes"], np.int32)
    gone = [changes[low] if low < high else -1 for low, high in itertools.pairwise(starts)]
    assert gone == result.evicted_at[4].tolist()
    assert (body["sink"], body["recent"]) == (4, 8)
    assert unpacked(body["held"], np.int32).tolist() == fates.held.tolist()
    assert unpacked(body["mass"], np.float32) == pytest.approx(given.mass, rel=1e-6)
    assert unpacked(body["later"], np.float32) == pytest.approx(given.mass_later, rel=1e-6)
    assert body["texts"] == [one.text for one in display(trace)]
    assert unpacked(body["ids"], np.int32).tolist() == trace.tokens.tolist()
    for name, label in (("kept_mass", "kept mass"), ("churn", "churn"), ("retained", "tokens held")):
        assert body["figures"][label] == result.steps[name].to_list()
    assert (live["step"], live["selected"], live["colour"], live["levels"]) == (9, "", "fate", None)
    assert app.subheader[0].value == "Evicted at step 9: 1 token"
    (shown,) = [one.value for one in app.dataframe]
    assert shown["position"].to_list() == fates.left(9).tolist()


def test_moving_leaves_the_data_as_it_is():
    app = open_page("text", step="9")
    before = [one.proto.bytes for one in app.get("bidi_component") if one.proto.bytes]
    app.query_params["step"] = "10"
    app.run()
    assert app.subheader[0].value.startswith("Evicted at step 10:")
    assert [one.proto.bytes for one in app.get("bidi_component") if one.proto.bytes] == before


@pytest.mark.parametrize("layer", [None, 3])
def test_attention_of_the_selected_tokens(layer):
    chosen = {} if layer is None else {"layer": f"of layer {layer}"}
    app = open_page("text", trace=MULTI, selected="3-9,260,262", colour="attention", **chosen)
    assert not errors(app)
    _, _, live = given_to_browser(app)
    trace = kvsim.open_trace(MULTI)
    values = attention_of(trace, [260, 262], layer)
    shading = shade(values)
    assert live["selected"] == "3-9,260,262"
    assert unpacked(live["values"], np.float32) == pytest.approx(values, rel=1e-6)
    assert unpacked(live["levels"], np.uint8).tolist() == shading.levels.tolist()
    assert live["shading"]["edges"] == list(shading.edges)
    assert f"{shading.sink:.4g}" in live["shading"]["after"]
    fates = fates_of(kvsim.replay(trace, "ema:0.8", budget="10%"))
    found = attention_on(trace, [*range(3, 10), 260, 262], layer, fates=fates)
    words = " ".join(said(app))
    assert f"9 selected tokens get {found.full.mean():.4f}" in words
    assert f"still see {found.visible.mean():.4f}" in words
    assert "7 selected prompt tokens have no recorded queries" in words


def test_the_states_of_the_step():
    app = open_page("text", trace=MULTI, policy="h2o", group="layer 2 head 1", step="1", state="true")
    assert not errors(app)
    result = kvsim.replay(MULTI, "h2o", budget="10%")
    states = states_after(result, kvsim.open_trace(MULTI), 1)[7]
    found = unpacked(given_to_browser(app)[2]["states"], np.float32)
    assert found == pytest.approx(states, rel=1e-6, nan_ok=True)
    (shown,) = [one.value for one in app.dataframe]
    assert shown["m"].to_list() == pytest.approx(states[shown["position"].to_numpy()].tolist())


def test_prompt_tokens_ask_nothing():
    app = open_page("text", trace=MULTI, selected="3-9", colour="attention")
    assert not errors(app)
    assert any("no recorded queries" in one.value for one in app.info)
    assert given_to_browser(app)[2]["levels"] is None


def test_shadow_mode_and_a_capture_of_head_means():
    app = open_page("text", trace=LONG, shadow="true", step="8", policy="ema:0.9")
    assert not errors(app)
    header, body, _ = given_to_browser(app)
    result = kvsim.replay(LONG, "ema:0.9", budget="10%", shadow=True)
    assert header["mode"] == "shadow"
    starts, changes = unpacked(body["starts"], np.int32), unpacked(body["changes"], np.int32)
    for step in (1, 8, 160):
        turned = [(changes[low:high] <= step).sum() % 2 for low, high in itertools.pairwise(starts)]
        end = 60 + step
        assert np.flatnonzero(np.array(turned[:end]) == 0).tolist() == result.retained(step).tolist()
    assert app.subheader[0].value.startswith("Left the set at step 8:")


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"selected": "9999"}, "selected: 9999: positions are 0 to 559"),
        ({"selected": "a"}, "selected: 'a' is no position"),
        ({"trace": LONG, "policy": "tova/group=head"}, "scores"),
    ],
)
def test_errors_are_said_inline(parameters, why):
    app = open_page("text", **parameters)
    assert not app.exception
    assert any(why in one for one in errors(app))


def test_a_recording_without_text(tmp_path):
    rows = np.zeros((3, 2, 2, 11), dtype=np.float32)
    for t in range(3):
        rows[t, ..., : 9 + t] = 1 / (9 + t)
    np.savez(tmp_path / "a.npz", attention=rows, prompt_length=8)
    import_npz(tmp_path / "a.npz", tmp_path / "bare")
    app = open_page("text", trace=str(tmp_path / "bare"), budget="4", step="99")
    assert not errors(app)
    assert app.warning[0].value == "The recording has no text; positions are shown."
    _, body, live = given_to_browser(app)
    assert body["texts"] == [str(i) for i in range(11)]
    assert (body["ids"], live["step"]) == (None, 3)


def test_the_commands_give_what_is_shown(tmp_path):
    app = open_page("text", trace=MULTI, policy="tova", group="layer 2", step="7", selected="3-9", state="true")
    lines = app.code[0].value.splitlines()
    assert [line.split()[1] for line in lines] == ["replay", "analyze", "chart"]
    told = CliRunner().invoke(cli, [*shlex.split(lines[1])[1:], "--json"])
    assert told.exit_code == 0, told.output
    (shown,) = [one.value for one in app.dataframe if "evicted_at" in one.value.columns]
    assert [one["position"] for one in json.loads(told.stdout)["tokens"]] == shown["position"].to_list()
    drawn = CliRunner().invoke(cli, [*shlex.split(lines[2])[1:-2], "--out", str(tmp_path / "a.json")])
    assert drawn.exit_code == 0, drawn.output
    # In a process of its own, where nothing is imported yet.
    asked = f"{app.code[1].value}\nprint(fates.left(7).tolist())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == shown["position"].to_list()
