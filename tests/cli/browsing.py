"""Pages in a real browser, and text that would do something there if a page did not take it for text."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">'


@contextmanager
def chromium() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def pages(browser, file: Path) -> Iterator[Callable]:
    """``opened(width, height)``: the page of a file. In the end: no error, no message, no request but for the file."""
    told, requests, loads, contexts = [], [], [], []

    def opened(width: int = 1280, height: int = 900, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("dialog", lambda dialog: told.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.on("framenavigated", lambda frame: loads.append(frame.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.hacked") is None
        context.close()
    assert told == []
    loaded = [url for url in requests if not url.startswith(("data:", "blob:"))]
    assert loaded == loads and set(loads) == {file.as_uri()}
