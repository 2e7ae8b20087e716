"""A headless Chromium."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser")) if p), None)
DRIVER = shutil.which("chromedriver")


class Browser:
    """A tab.

    Attributes:
        driver: selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def size(self, width: int, height: int, scheme: str = "light") -> None:
        """Show pages on a screen of this size, and in a colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        """Load a page."""
        self.driver.get(url)

    def js(self, script: str, *arguments: Any) -> Any:
        """The value of a script."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until a script's value is true; returns it."""
        deadline = time.monotonic() + seconds
        while not (value := self.js(f"return {script}")):
            assert time.monotonic() < deadline, script
            time.sleep(0.1)
        return value

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.js("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        """Click an element, as a person would."""
        self.driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        field = self.driver.find_element("css selector", selector)
        field.clear()
        field.send_keys(text)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the screen."""
        self.driver.save_screenshot(str(path))

    def errors(self) -> list[str]:
        """What the console has of errors since the last call, refused connections left out."""
        entries = self.driver.get_log("browser")
        return [
            e["message"]
            for e in entries
            if e["level"] == "SEVERE" and "Failed to load resource" not in e["message"]
        ]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A tab of a browser of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument("--disable-dev-shm-usage")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
