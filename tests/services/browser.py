"""A real browser, without a screen: Debian's Chromium, driven through its own driver."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.services.debian import why_missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
# It asks nobody for anything; and in a container it has no sandbox of its own.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"),
)


def why_impossible() -> str:
    """Return why there is no browser, or nothing after installing what is missing."""
    return why_missing(PROGRAMS, PACKAGES)


@contextmanager
def browser(folder: Path) -> Iterator[webdriver.Chrome]:
    """Run a browser with an empty profile in ``folder``; what its console says is kept."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


def emulate(driver: webdriver.Chrome, width: int, height: int, scheme: str) -> None:
    """Give the page so much room, in CSS pixels, and what its reader prefers: light or dark."""
    size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "mobile": False})
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


if __name__ == "__main__":
    sys.exit(why_impossible() or None)
