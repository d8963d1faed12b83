"""The status page, in a real browser."""

import re

import pytest
from capabilities import BROWSER, needs_browser
from served import COLUMNS, serving, wait_for, write_file

HOSTILE = "<script>document.title = 'hacked'</script><b>x</b> & \"q\" 'a"


def test_the_page_is_self_contained(server):
    page = server.ask("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = page.body.decode()
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in text


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """Give a server with a hostile name of a column, some traffic, errors and a version that failed."""
    path = tmp_path_factory.mktemp("page") / "clicks.onnx"
    columns = [{**COLUMNS[0], "name": HOSTILE}, *COLUMNS[1:]]
    write_file(path, columns=columns, names={"user": HOSTILE}, facts={"model": "<i>lr</i>"})
    with serving(path) as server:
        users = ["ann", "bob", "nobody", "15"] * 150
        prices = [number % 40 - 10 for number in range(600)]
        body = {"columns": {HOSTILE: users, "tags": [["a"], ["zzz"]] * 300, "price": prices}}
        assert server.score(body).status == 200
        assert server.score({"rows": []}).status == 400
        path.write_bytes(b"nonsense")
        server.ask("POST", "/v2/repository/models/clicks/load")
        yield server


@pytest.fixture
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@needs_browser
@pytest.mark.slow
def test_the_page_shows_what_the_server_counted(busy, browser):
    from playwright.sync_api import expect

    page = browser.new_page(viewport={"width": 1100, "height": 900})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.goto(f"http://{busy.url}/")
    page.wait_for_selector(".card")
    text = page.inner_text("main")
    assert f"version {busy.status['models'][0]['version']}" in text
    assert "The last version could not be loaded: 'clicks' cannot be served: ONNX Runtime" in text
    assert "<i>lr</i>" in text
    assert page.title() == "Rarebit server"
    figures = dict(
        zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True)
    )
    assert (figures["requests"], figures["errors"], figures["rows"]) == ("2", "1", "600")
    assert page.locator("th").all_inner_texts() == ["tags", HOSTILE]
    assert page.locator("td:last-child").all_inner_texts() == ["50.0 %", "25.0 %"]
    widths = page.locator(".fill").evaluate_all("all => all.map((one) => one.style.width)")
    assert widths == ["50%", "25%"]
    assert "Population stability index" in text
    heights = page.locator("rect").evaluate_all(
        "all => all.map((one) => Number(one.getAttribute('height')))"
    )
    tenths = busy.status["models"][0]["drift"]["tenths"]
    assert heights == pytest.approx([110 * one / max(90, *tenths) for one in tenths])
    # it refreshes itself and keeps its elements
    page.evaluate("document.querySelector('.card').marked = true")
    assert busy.score({"rows": []}).status == 400
    expect(page.locator("dd").nth(1)).to_have_text("2")
    assert page.evaluate("document.querySelector('.card').marked")
    assert problems == []


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(busy, browser, scheme):
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.goto(f"http://{busy.url}/")
    page.wait_for_selector(".card")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 246, 243)", "dark": "rgb(19, 22, 24)"}[scheme]


@needs_browser
@pytest.mark.slow
def test_the_page_says_when_the_server_is_gone(tmp_path, browser):
    with serving(write_file(tmp_path / "clicks.onnx")) as server:
        page = browser.new_page()
        page.goto(f"http://{server.url}/")
        page.wait_for_selector(".card")
        server.stop()
        page.wait_for_selector("#server.wrong")
        assert "The server does not answer" in page.inner_text("#server")
        assert wait_for(lambda: page.inner_text("h2") == "clicks")
