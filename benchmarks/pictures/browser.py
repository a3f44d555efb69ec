"""Take pictures of pages with a headless Chromium, and read what it made of them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# A page holds no script that has to come to an end.
SECONDS = 90


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome, or None if none is installed (Debian: apt-get install chromium)."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def take_picture(page: Path, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Write a picture (PNG) of the upper left of a page; windows are at least 500 pixels wide."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(page, *scheme, f"--window-size={width},{height}", f"--screenshot={picture}")


def read_page(page: Path) -> str:
    """Return the page's document as the browser holds it after loading, as HTML."""
    return _run(page, "--allow-file-access-from-files", "--virtual-time-budget=3000", "--dump-dom")


def _run(page: Path, *options: str) -> str:
    browser = find_browser()
    assert browser, "no Chromium is installed; on Debian: apt-get install chromium"
    with tempfile.TemporaryDirectory() as profile:
        fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command = [browser, *fixed, f"--user-data-dir={profile}", *options, page.resolve().as_uri()]
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return process.stdout
