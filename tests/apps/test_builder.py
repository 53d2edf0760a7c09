"""The text box and the builder: each updates the other, and errors are the parser's."""

import pytest
from exploring import errors, open_page

from kvsim import PolicyError, parse
from kvsim.head import HEADS


def test_text_sets_the_builder_and_the_builder_the_text():
    app = open_page("trace", policy="tova")
    assert not errors(app)
    app.text_input(key="policy").set_value("ema:0.9,over=step/refresh=4/group=layer").run()
    assert app.selectbox(key="build head").value == "ema"
    assert app.text_input(key="build head ema alpha").value == "0.9"
    assert app.selectbox(key="build head ema over").value == "step"
    assert app.text_input(key="build refresh").value == "4"
    assert app.selectbox(key="build group").value == "layer"
    app.text_input(key="build refresh").set_value("first").run()
    assert app.text_input(key="policy").value == "ema:0.9,over=step/refresh=first/group=layer"
    app.selectbox(key="build score").set_value("entropy").run()
    assert app.text_input(key="policy").value == "ema:0.9,over=step/score=entropy/refresh=first/group=layer"
    assert not errors(app)


def test_the_parser_says_what_is_wrong():
    app = open_page("trace", policy="emma:0.9")
    with pytest.raises(PolicyError) as wrong:
        parse("emma:0.9")
    assert errors(app) == [str(wrong.value)]
    app.text_input(key="policy").set_value("ema:0.9").run()
    assert not errors(app)
    app.text_input(key="build head ema alpha").set_value("1.5").run()
    assert errors(app) == ["alpha of 'ema' must be in [0, 1), got 1.5"]
    assert app.text_input(key="policy").value == "ema:0.9"


@pytest.mark.slow
def test_every_head_can_be_built():
    app = open_page("trace", policy="ema:0.8")
    assert app.selectbox(key="build head").options[0] == "adahead"
    failed = {}
    for head in sorted(HEADS):
        app.selectbox(key="build head").set_value(head).run()
        assert not app.exception, head
        text = app.text_input(key="policy").value
        if parse(text).head.name != head:
            failed[head] = errors(app)
    # A head that must be given a whole policy or a file cannot be guessed; the builder says what it needs.
    assert all(any("needs" in one for one in messages) for messages in failed.values()), failed
