from collections.abc import Iterator

import pytest
from browsing import Tab, browser, served, tab
from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="session")
def explorer() -> Iterator[str]:
    with served() as address:
        yield address


@pytest.fixture
def screen(chromium: Browser, explorer: str) -> Iterator[Tab]:
    """A page of the running explorer; whatever its console complains about fails the test."""
    with tab(chromium, explorer) as opened:
        yield opened
        assert opened.complaints == []
