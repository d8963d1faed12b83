"""Every kind of page in a real browser: what it asks for, how it reads, on phones and wide screens, dark and light."""

import pytest
from capabilities import needs_browser, needs_package, slow_after
from report_kinds import KINDS

from rarebit.report.report import report

pytestmark = [needs_browser, needs_package("axe_playwright_python")]


@pytest.fixture
def opened(browser):
    """Open a page; at the end it has asked for nothing and reported nothing."""
    contexts, problems = [], []

    def open_page(path, width=1400, scheme="light", **options):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda line: problems.append(line.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                problems.append(request.url)
                if request.url != path.as_uri() and not request.url.startswith("data:")
                else None
            ),
        )
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize("kind", slow_after(KINDS), indirect=True)
@pytest.mark.parametrize("scheme", slow_after(["dark", "light"]))
@pytest.mark.parametrize("width", slow_after([360, 1400]))
def test_a_page_is_accessible_and_fits(kind, width, scheme, opened, tmp_path):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(report(kind, tmp_path / "page.html"), width, scheme)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]


@pytest.mark.parametrize("kind", ["study"], indirect=True)
def test_a_page_is_read_without_a_script(kind, opened, tmp_path):
    path = report(kind, tmp_path / "page.html")
    plain, full = opened(path, java_script_enabled=False), opened(path)
    text = full.inner_text("main").replace("\u2195", "")
    assert plain.inner_text("main").replace("\u2195", "") == text
    assert "+0.0092 (+0.0076 to +0.0109)" in plain.inner_text(".verdict")
    assert plain.locator("button").count() == 0


@pytest.mark.parametrize("kind", ["study"], indirect=True)
def test_tables_sort_by_number_and_points_have_tips(kind, opened, tmp_path):
    page = opened(report(kind, tmp_path / "page.html"))
    table = page.locator("table.sort").filter(has_text="rarest fifth").nth(0)

    def aucs():
        cells = table.locator("tbody td:nth-child(4)").all_inner_texts()
        return [float(cell.split()[0]) for cell in cells]

    before = aucs()
    button = table.locator("th:nth-child(4) button")
    button.click()
    assert aucs() == sorted(before)
    assert table.locator("th:nth-child(4)").get_attribute("aria-sort") == "ascending"
    button.press("Enter")
    assert aucs() == sorted(before, reverse=True)
    assert page.locator("#tip").is_hidden()
    point = page.locator(".chart path.p").first
    point.hover(force=True)
    assert page.inner_text("#tip") == point.get_attribute("data-t")


@pytest.mark.parametrize("kind", ["study"], indirect=True)
def test_a_page_prints_with_its_settings_on_white(kind, opened, tmp_path):
    page = opened(report(kind, tmp_path / "page.html"), scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")
