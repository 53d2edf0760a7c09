"""What the reproduce boxes offer runs without the explorer."""

import ast

import pytest
from exploring import MULTI, errors, open_page
from kvsim_explorer.pages import PAGES


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_needs_kvsim_alone(page: str):
    app = open_page(page, trace=MULTI, policy="ema:0.8", others="cumulative", selected="250-252")
    assert not errors(app)
    (code,) = [block.value for block in app.code if block.value.startswith("import kvsim")]
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in names]
    assert all((module or "").partition(".")[0] == "kvsim" for module in modules), modules
