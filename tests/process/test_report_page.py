"""The page of ``resilient report -o`` in a real browser: what is seen, and that all of it is.

Its pictures are left in ``build/pages``, to be looked at.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from tests.helpers.cli_repositories import truncate_file, write_usual_run
from tests.helpers.seen import NARROW, WIDE, check_seen, find_shown, go, press
from tests.helpers.told import killed_run
from tests.process.gangs import ROOT
from tests.services.browser import browser, emulate, why_impossible
from tests.services.presence import require

PICTURES = ROOT / "build" / "pages"
GREY = 32  # between the channels of a colour that one sees as grey

COLOURS = (
    "return [...document.querySelectorAll(arguments[0])].map((one) => getComputedStyle(one).%s)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Open the page of a run with a killed rank and a preemption."""
    require("browser", why_impossible())
    folder = tmp_path_factory.mktemp("report")
    (folder / "events").mkdir()
    (folder / "events" / "agent.jsonl").write_text("\n".join(killed_run()) + "\n")
    write_usual_run(folder)
    truncate_file(folder / "checkpoint-35-g2" / "model.r00000.safetensors", 300)
    path = folder / "run.html"
    command = [sys.executable, "-m", "resilient_cli", "report", str(folder), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    with browser(folder) as driver:
        driver.get("about:blank")
        driver.get_log("performance")
        driver.get(path.as_uri())
        yield driver


def rgb_of(text):
    return [int(one) for one in re.findall(r"\d+", text)]


def spread_of(text):
    return max(rgb_of(text)) - min(rgb_of(text))


@pytest.mark.smoke
def test_it_asks_for_nothing_but_itself_and_says_no_error(page):
    messages = [json.loads(one["message"])["message"] for one in page.get_log("performance")]
    asked = [
        one["params"]["request"]["url"]
        for one in messages
        if one["method"] == "Network.requestWillBeSent"
    ]
    assert [Path(one).name for one in asked] == ["run.html"]
    assert page.get_log("browser") == []


@pytest.mark.parametrize("view", ["run", "checkpoints"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("room", [WIDE, NARROW], ids=["wide", "narrow"])
def test_all_of_it_is_seen_and_can_be_read(page, scheme, room, view):
    go(page, view)
    check_seen(page, room, scheme, PICTURES / f"report-{view}-{scheme}-{room[0]}.png")


def test_the_reader_chooses_light_or_dark(page):
    grounds = []
    for scheme in ("light", "dark"):
        emulate(page, *WIDE, scheme)
        grounds += page.execute_script(COLOURS % "backgroundColor", "body")
    light, dark = map(rgb_of, grounds)
    assert min(light) > 200
    assert max(dark) < 60


def test_what_is_wider_than_the_window_is_moved_with_the_keyboard(page):
    go(page, "run")
    emulate(page, *NARROW, "light")
    page.execute_script("document.activeElement.blur()")
    parts, moved = find_shown(page, ".scroll"), set()
    for _ in range(len(parts) + 6):
        press(page, Keys.TAB)
        part = page.switch_to.active_element
        if part.get_attribute("class") == "scroll":
            press(page, Keys.ARROW_RIGHT)
            moved.add(part.id)
    assert len(moved) == len(parts)
    WebDriverWait(page, 10).until(
        lambda _: page.execute_script(
            "return [...document.querySelectorAll('#run .scroll:has(svg)')]"
            ".every((one) => one.scrollLeft > 0)"
        )
    )


def test_lives_faults_and_lost_parts_are_told_apart(page):
    go(page, "run")
    emulate(page, *WIDE, "light")
    lives = [one.text for one in page.find_elements(By.CSS_SELECTOR, "svg .name")]
    assert {"run", "attempt 1", "attempt 2", "attempt 3"} <= set(lives)
    titles = page.execute_script(
        "return [...document.querySelectorAll('.fault title')].map((one) => one.textContent)"
    )
    assert len(titles) == 2
    assert any("signal 9" in one for one in titles)
    kept = page.execute_script(COLOURS % "stroke", "polyline.kept")
    gone = page.execute_script(COLOURS % "stroke", "polyline.gone")
    assert max(spread_of(one) for one in gone) < GREY < min(spread_of(one) for one in kept)
    bars = page.execute_script(COLOURS % "backgroundColor", ".bar i")
    assert len(set(bars)) == len(bars) > 3


def test_a_served_page_renews_itself_and_says_when_it_is_served_no_more(page, tmp_path):
    (tmp_path / "events").mkdir()
    file = tmp_path / "events" / "agent.jsonl"
    file.write_text("\n".join(killed_run()[:9]) + "\n")
    command = [sys.executable, "-m", "resilient_cli", "ui", str(tmp_path), "-q"]
    page.get_log("browser")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        page.get(process.stdout.readline().strip())
        assert "aws: spot terminate" not in page.page_source
        file.write_text("\n".join(killed_run()) + "\n")
        WebDriverWait(page, 20, 0.1).until(lambda _: "aws: spot terminate" in page.page_source)
        # Its own look is kept: nothing that its rules forbid is needed for it.
        bars = page.execute_script(COLOURS % "backgroundColor", ".bar i")
        assert len(set(bars)) == len(bars) > 3
        assert [one for one in page.get_log("browser") if "favicon" not in one["message"]] == []
        page.save_screenshot(str(PICTURES / "served.png"))
        process.terminate()
    last = page.find_element(By.ID, "live")
    WebDriverWait(page, 20, 0.1).until(lambda _: last.text.startswith("server stopped"))
    assert "aws: spot terminate" in page.page_source
