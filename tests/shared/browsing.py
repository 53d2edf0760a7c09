"""A real headless Chromium on a running explorer."""

import contextlib
import csv
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ROOT = Path(__file__).parents[2]
READY = '[data-testid="stApp"][data-test-script-state="notRunning"]'


def find_browser() -> str:
    """Give the path of a Chromium; without one a test is skipped, and in CI fails."""
    named = os.environ.get("KVSIM_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium: install it or set KVSIM_CHROMIUM")
    return found


@contextlib.contextmanager
def served(*words: str, folder: Path = ROOT) -> Iterator[str]:
    """Run ``kvsim app`` on a free port while the block runs; gives its address."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvsim", "app", "--no-browser", "--port", str(port), *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            address = f"http://localhost:{port}"
            _wait(address, process)
            yield address
        finally:
            process.terminate()
            process.communicate(timeout=30)


def _wait(address: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if process.poll() is not None:
            output = b"" if process.stdout is None else process.stdout.read()
            raise RuntimeError(f"kvsim app ended: {output.decode()}")
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"{address}/_stcore/health"),
        ):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{address} did not answer")


@dataclass
class Tab:
    """One page of a browser, and what it complained about."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)

    def go(self, page: str, **parameters: str) -> None:
        """Open a page of the explorer, with parameters as in a shared URL, and wait until it stands."""
        self.page.goto(f"{self.address}/?{urlencode({'page': page, **parameters})}")
        self.settle()

    def settle(self) -> None:
        """Wait until the script has run and what it sent is drawn."""
        self.page.wait_for_selector(READY, timeout=90_000)
        # The script may start a moment after the event that caused it.
        self.page.wait_for_timeout(250)
        self.page.wait_for_selector(READY, timeout=90_000)

    def wait_for_value(self, key: str, value: str) -> None:
        """Wait until the text box with a key holds a text, and the page stands."""
        expect(self.page.locator(f".st-key-{key} :is(input, textarea)").first).to_have_value(value, timeout=30_000)
        self.settle()

    def parameters(self) -> dict[str, str]:
        """Give the parameters in the address bar."""
        return dict(parse_qsl(urlsplit(self.page.url).query))

    def enter(self, key: str, text: str) -> None:
        """Type into the text box with a key."""
        box = self.page.locator(f".st-key-{key} :is(input, textarea)").first
        box.fill(text)
        box.press("Enter" if box.evaluate("one => one.tagName") == "INPUT" else "Control+Enter")
        self.settle()

    def pick(self, key: str, option: str) -> None:
        """Choose an option of the drop-down with a key."""
        box = self.page.locator(f".st-key-{key} input").first
        # On a busy machine a page drawn late closes the list, and keys can come before it opens.
        for _ in range(10):
            with contextlib.suppress(PlaywrightTimeoutError):
                box.click()
                box.fill(option)
                self.page.get_by_role("option").first.wait_for(timeout=3_000)
                box.press("Enter")
            box.blur()
            self.settle()
            if box.input_value() == option:
                return
        raise AssertionError(f"{option} could not be chosen in {key}")


def _note_failure(tab: Tab, url: str, failure: str) -> None:
    # A download is a request that ends as the browser takes the file.
    if "ERR_ABORTED" not in failure:
        tab.complaints.append(f"{url}: {failure}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run a headless Chromium while the block runs."""
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield running
        finally:
            running.close()


@contextlib.contextmanager
def tab(running: Browser, address: str, *, width: int = 1280, scheme: Any = "light") -> Iterator[Tab]:
    """Open a page that remembers errors of the console, failed requests and exceptions."""
    context = running.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True)
    opened = Tab(context.new_page(), address)
    opened.page.on("console", lambda one: opened.complaints.append(one.text) if one.type == "error" else None)
    opened.page.on("pageerror", lambda one: opened.complaints.append(str(one)))
    opened.page.on("requestfailed", lambda one: _note_failure(opened, one.url, str(one.failure)))
    try:
        yield opened
    finally:
        context.close()


def csv_of(screen: Tab, name: str) -> list[dict[str, str]]:
    """Download a table as CSV: what the page shows, whole."""
    with screen.page.expect_download() as coming:
        screen.page.locator(f".st-key-csv-{name} button").click()
    with open(coming.value.path(), newline="") as file:
        return list(csv.DictReader(file))
