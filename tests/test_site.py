"""The documentation as a site: built with warnings as errors, complete, and read in a real browser."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from capabilities import BROWSER, needs_browser, needs_package

import rarebit as rb
from rarebit.technique import technique_names

pytestmark = [pytest.mark.slow, needs_package("mkdocs")]
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_every_method_and_every_public_name_has_its_place(site):
    assert {path.name for path in (site / "methods").iterdir() if path.is_dir()} == {
        *technique_names()
    }
    tail = (site / "methods/tail/index.html").read_text("utf-8")
    assert "= n_i / (n_i + f) v_i" in tail  # the equation of its file
    assert "<td><code>forget</code></td>" in tail  # its settings
    api = (site / "api/index.html").read_text("utf-8")
    assert ".from_frame(frame, label=None" in api  # as one calls it, without cls
    names = [name for name in rb.__all__ if callable(getattr(rb, name))]
    assert [
        name
        for name in names
        if f"<code>rb.{name}</code></h3>" not in re.sub(r"<a .*?</a>", "", api)
    ] == []


def test_every_link_and_image_leads_to_a_file(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text("utf-8"), flags=re.DOTALL)
        targets = re.findall(r'\b(?:href|src|srcset)="(?!\w+:|#|/)([^"#?]+)', text)
        missing = [target for target in targets if not (page.parent / target).exists()]
        assert missing == [], page.relative_to(site)
        assert "<!-- figures" not in text


@needs_browser
@needs_package("axe_playwright_python")
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1400, "dark")])
def test_pages_are_accessible_fit_and_load_nothing_from_elsewhere(address, browser, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    asked, problems = [], []
    for name in ("", "methods/tail/", "evidence/"):
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address + name)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
    context.close()
    assert problems == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@needs_browser
def test_search_finds_a_method(address, browser):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(address)
    page.get_by_placeholder("Search").click()
    page.keyboard.type("evidence coding")
    result = page.locator(".md-search-result__link", has_text="evidence-coding").first
    result.click()
    page.wait_for_url("**/evidence-coding/**")
    page.close()
