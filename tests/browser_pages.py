"""Pages in headless Chromium: what they show, and what they say to the console and ask of the network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Opened:
    """A page with what it said to the console and asked of the network."""

    def __init__(self, browser: Browser, path: Path, *, anchor: str = "", is_open: bool = True, **view: Any) -> None:
        usual_view: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
        self.page: Page = browser.new_page(**(usual_view | view))
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(path.as_uri() + anchor)
        has_credit = self.page.locator("#credit").count() > 0
        if has_credit:
            self.page.wait_for_selector("#panels .tokens span", state="attached")
        measured = session.send("Performance.getMetrics")["metrics"]
        self.busy_seconds = {entry["name"]: entry["value"] for entry in measured}["TaskDuration"]
        if is_open and has_credit:
            self.page.evaluate("document.querySelector('#credit').open = true")

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def tip(self, panel: int, token: int) -> dict[str, str]:
        """What a token shows under the pointer."""
        self.page.mouse.move(0, 0)
        self.page.locator("#panels .tokens").nth(panel).locator("span").nth(token).hover()
        names = self.page.locator("#tip dt").all_text_contents()
        values = self.page.locator("#tip dd").all_text_contents()
        return dict(zip(names, values, strict=True))

    def draw_all(self) -> int:
        """Reaches every chart, in parts that are folded too; returns their number."""
        self.page.evaluate("document.querySelectorAll('details').forEach((part) => part.open = true)")
        charts = self.page.locator(".opening figure, .charts figure")
        for number in range(charts.count()):
            charts.nth(number).scroll_into_view_if_needed()
            charts.nth(number).locator(".plot svg").wait_for()
        return charts.count()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.text_content() or ""

    def is_quiet(self) -> bool:
        """Nothing was told to the console, and nothing asked but the page itself."""
        address = self.page.url.partition("#")[0]
        return self.errors == [] and self.requests == [address]


def colours_of(tokens: Locator) -> list[str]:
    """The classes of tokens and their share of full colour, such as `more 50%`."""
    return tokens.evaluate_all(
        "all => all.map((token) => token.className + ' ' + token.style.getPropertyValue('--share'))"
    )
