"""A headless Chromium that opens a page from a file and hands back its document."""

import shutil
import subprocess
import tempfile
from pathlib import Path

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
"""None where there is none: the tests of pages are skipped then."""
TIMEOUT_S = 60


def run_chromium(page: Path, *arguments: str, fragment: str = "") -> str:
    """Opens the page offline with a fresh profile; answers what it writes to standard output."""
    assert CHROMIUM is not None, "no chromium"
    with tempfile.TemporaryDirectory() as profile:
        result = subprocess.run(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                f"--user-data-dir={profile}",
                "--window-size=1500,950",
                *arguments,
                f"file://{page}{fragment}",
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert result.returncode == 0, result.stderr
    return result.stdout
