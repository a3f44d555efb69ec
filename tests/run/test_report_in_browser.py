"""The report in a real browser: nothing of the user's runs, no width is exceeded, and dark is dark.

It needs Chromium (on Debian: apt-get install chromium) and says so where there is none.
"""

from __future__ import annotations

import pytest
from PIL import Image

from benchmarks.pictures.browser import find_browser, read_page, take_picture
from tests.run.run_folders import ANSWERS, HOSTILE, log_entries, make_run
from unsloth_ddp.run.documents.record import read_run
from unsloth_ddp.run.documents.report import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed (apt-get install chromium)"),
]
# A page around the report that measures it at a phone's width, which a window of the browser does not have.
FRAME = """<!doctype html><iframe id=f src="r/report.html" style="width:{width}px;height:900px;border:0"></iframe>
<pre id=out></pre><script>f.onload = () => {{
  const page = f.contentDocument.documentElement
  const wide = [...f.contentDocument.querySelectorAll("main *")].filter(
    e => !e.closest(".scroll, svg") && e.getBoundingClientRect().right > {width} + 1)
  const charts = [...f.contentDocument.querySelectorAll("svg")].map(e => e.getBoundingClientRect().width)
  const over = page.scrollWidth - {width}
  out.textContent = `over ${{over}} wide ${{wide.length}} least chart ${{Math.min(...charts) > 200}}`
}}</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with long and hostile texts."""
    long_word = "x" * 300
    answers = [{**ANSWERS[0], "before": HOSTILE, "after": f"{HOSTILE} {long_word}"}]
    settings = {"model": f"/models/{long_word}", "dataset": [HOSTILE], "run_name": "r"}
    made = make_run(
        tmp_path_factory.mktemp("browser") / "r",
        settings=settings,
        answers=answers,
        history=log_entries(200, rate=0.01),
    )
    write_report(read_run(made))
    return made


def test_no_script_of_the_users_texts_runs(folder):
    document = read_page(folder / "report.html")
    assert "<title>r</title>" in document
    assert "<script" not in document and "<img" not in document
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in document


@pytest.mark.parametrize("width", [360, 400, 700, 1280])
def test_nothing_is_wider_than_the_window(folder, width):
    frame = folder.parent / f"frame_{width}.html"
    frame.write_text(FRAME.format(width=width))
    assert "over 0 wide 0 least chart true" in read_page(frame)


def test_it_is_dark_where_the_reader_prefers_that(folder, tmp_path):
    corners = []
    for dark in (False, True):
        take_picture(folder / "report.html", tmp_path / "page.png", 1280, 900, dark=dark)
        with Image.open(tmp_path / "page.png") as picture:
            assert picture.size == (1280, 900)
            corners.append(sum(picture.convert("RGB").getpixel((2, 2))))
            # Text and curves are there: the page is not one colour.
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 100
    assert corners[0] > 700 and corners[1] < 100
