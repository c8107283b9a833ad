"""Checkpoints on the page, in a real browser: opened, searched, sorted, compared, by keyboard.

Its pictures are left in ``build/pages``, to be looked at.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from tests.helpers.inspected_runs import EVIL, spoil, write_inspected_run
from tests.helpers.seen import NARROW, WIDE, check_seen, find_shown, go, press, settle
from tests.process.gangs import ROOT
from tests.services.browser import browser, emulate, why_impossible
from tests.services.presence import require

PICTURES = ROOT / "build" / "pages"
LAST, BEFORE = "checkpoint-50-g2", "checkpoint-40-g2"
SPOILT = "model/h.7.attn.weight"
ROOMS = pytest.mark.parametrize("room", [WIDE, NARROW], ids=["wide", "narrow"])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    require("browser", why_impossible())
    folder = write_inspected_run(tmp_path_factory.mktemp("inspected") / "run")
    spoil(folder)
    return folder


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    """Open the page that `resilient ui` serves."""
    command = [sys.executable, "-m", "resilient_cli", "ui", str(run), "-q"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process,
        browser(tmp_path_factory.mktemp("served")) as driver,
    ):
        driver.get(process.stdout.readline().strip())
        yield driver
        process.terminate()


@pytest.fixture(scope="module")
def compared(run, tmp_path_factory):
    """Open the page of `ckpt diff --html`."""
    path = tmp_path_factory.mktemp("compared") / "diff.html"
    command = [sys.executable, "-m", "resilient_cli", "ckpt", "diff", BEFORE, LAST, str(run)]
    subprocess.run([*command, "--html", str(path)], check=True, capture_output=True, cwd=ROOT)
    with browser(path.parent) as driver:
        driver.get(path.as_uri())
        yield driver


@pytest.fixture(autouse=True)
def nothing_is_complained_of(request):
    yield
    for name in {"served", "compared"} & set(request.fixturenames):
        driver = request.getfixturevalue(name)
        said = [one for one in driver.get_log("browser") if "favicon" not in one["message"]]
        assert said == []
        assert driver.title != "taken"


def row_of(driver, name):
    (found,) = [
        one
        for one in find_shown(driver, "button.open")
        if one.text.strip() == name or one.text.strip().endswith(name)
    ]
    return found


def names_in(driver, table):
    return [
        one.text.strip() for one in find_shown(driver, f"#{table} > tbody > tr:first-child > th")
    ]


@SCHEMES
@ROOMS
def test_the_tree_sizes_and_what_verify_finds_are_seen(served, scheme, room):
    go(served, "checkpoints")
    emulate(served, *room, scheme)
    if not find_shown(served, "#verify-room .verdict"):
        (button,) = find_shown(served, "[data-verify=checkpoint-30-g1]")
        button.click()
        settle(served)
    (said,) = find_shown(served, "#verify-room .verdict")
    assert said.text == "checkpoint-30-g1: DAMAGED (level deep)."
    assert len(find_shown(served, "svg.tree .node")) == 2 * 4
    assert len(find_shown(served, "svg.tree path.broken")) == 2
    check_seen(served, room, scheme, PICTURES / f"checkpoints-{scheme}-{room[0]}.png")


@SCHEMES
@ROOMS
def test_a_tensor_opens_to_how_its_numbers_are_spread(served, scheme, room):
    emulate(served, *room, scheme)
    go(served, f"tensors/{LAST}")
    button = row_of(served, SPOILT)
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    settle(served)
    find = served.find_element(By.CSS_SELECTOR, "[data-find=tensor-list]")
    find.clear()
    find.send_keys("h.7.")
    assert len(find_shown(served, "svg.small")) == 2
    (wrong,) = find_shown(served, ".facts .bad")
    assert wrong.text == "2"
    check_seen(served, room, scheme, PICTURES / f"tensors-{scheme}-{room[0]}.png")


@SCHEMES
@ROOMS
def test_two_checkpoints_are_compared(served, scheme, room):
    emulate(served, *room, scheme)
    go(served, "compare")
    Select(served.find_element(By.ID, "a")).select_by_value(BEFORE)
    Select(served.find_element(By.ID, "b")).select_by_value(LAST)
    served.find_element(By.CSS_SELECTOR, "form .act").click()
    settle(served)
    assert served.current_url.endswith(f"#compare/{BEFORE}/{LAST}")
    first, *_ = names_in(served, "changes")
    assert first == SPOILT  # a NaN came, which is told before any number
    button = row_of(served, "model/head.weight")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    settle(served)
    assert len(find_shown(served, "svg.small")) == 2
    find = served.find_element(By.CSS_SELECTOR, "[data-find=changes]")
    find.clear()
    find.send_keys("model/*")
    check_seen(served, room, scheme, PICTURES / f"compare-{scheme}-{room[0]}.png")


@SCHEMES
@ROOMS
def test_a_comparison_in_a_file_is_seen_whole(compared, scheme, room):
    button = row_of(compared, "model/h.3.attn.weight")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    assert len(find_shown(compared, "svg.small")) == 2
    find = compared.find_element(By.CSS_SELECTOR, "[data-find=changes]")
    find.clear()
    find.send_keys("model/*")
    check_seen(compared, room, scheme, PICTURES / f"diff-{scheme}-{room[0]}.png")


def test_rows_are_searched_chosen_and_sorted(compared):
    emulate(compared, *WIDE, "light")
    compared.refresh()
    every = names_in(compared, "changes")
    find = compared.find_element(By.CSS_SELECTOR, "[data-find=changes]")
    find.send_keys("h.7.")
    assert names_in(compared, "changes") == [one for one in every if "h.7." in one]
    Select(compared.find_element(By.CSS_SELECTOR, "[data-part=changes]")).select_by_visible_text(
        "model"
    )
    few = names_in(compared, "changes")
    assert set(few) == {one for one in every if one.startswith("model/h.7.")}
    count = compared.find_element(By.ID, "changes-count")
    assert count.text == f"{len(few)} of {len(every)}"
    find.clear()
    find.send_keys("*.bias")
    assert set(names_in(compared, "changes")) == {
        one for one in every if one.startswith("model/") and one.endswith(".bias")
    }
    find.clear()
    find.send_keys(Keys.SPACE)
    same = "model/wte.weight"
    assert same in names_in(compared, "changes")
    compared.find_element(By.CSS_SELECTOR, "[data-only=changes]").click()
    assert same not in names_in(compared, "changes")
    compared.find_element(By.CSS_SELECTOR, "[data-only=changes]").click()
    Select(compared.find_element(By.CSS_SELECTOR, "[data-part=changes]")).select_by_visible_text(
        "all"
    )
    assert names_in(compared, "changes") == every


def test_rows_are_sorted_as_numbers_and_as_names(compared):
    emulate(compared, *WIDE, "light")
    compared.refresh()
    head = compared.find_elements(By.CSS_SELECTOR, "#changes thead button")[0]
    head.click()
    rising = names_in(compared, "changes")
    assert head.find_element(By.XPATH, "..").get_attribute("aria-sort") == "ascending"
    tenth = [nth for nth, one in enumerate(rising) if one.startswith("model/h.10.")]
    assert min(tenth) > max(nth for nth, one in enumerate(rising) if one.startswith("model/h.9."))
    head.click()
    assert names_in(compared, "changes") == rising[::-1]
    compared.find_elements(By.CSS_SELECTOR, "#changes thead button")[3].click()
    assert names_in(compared, "changes")[0] == SPOILT


def test_everything_is_reached_with_the_keyboard_in_the_order_in_which_it_is_seen(served):
    emulate(served, *WIDE, "light")
    go(served, "run")
    served.refresh()
    press(served, Keys.TAB)
    assert served.switch_to.active_element.text == "To the content"
    for name in ("Run", "Checkpoints", "Tensors", "Compare"):
        press(served, Keys.TAB)
        assert served.switch_to.active_element.text == name
    press(served, Keys.ENTER)
    settle(served)
    assert served.switch_to.active_element.text == "Compare"
    assert [one.text for one in find_shown(served, "nav a[aria-current]")] == ["Compare"]
    assert [one.get_attribute("id") for one in find_shown(served, "section")] == ["compare"]
    for name in ("a", "b"):
        press(served, Keys.TAB)
        assert served.switch_to.active_element.get_attribute("id") == name
    press(served, Keys.TAB)
    press(served, Keys.ENTER)
    settle(served)
    assert find_shown(served, ".verdict")
    served.back()
    settle(served)


def test_a_row_is_opened_and_closed_with_the_keyboard(served):
    emulate(served, *WIDE, "light")
    go(served, f"compare/{BEFORE}/{LAST}")
    find = served.find_element(By.CSS_SELECTOR, "[data-find=changes]")
    find.clear()
    find.send_keys("head.weight")
    for _ in range(40):
        press(served, Keys.TAB)
        if served.switch_to.active_element.get_attribute("class") == "open":
            break
    opened = served.switch_to.active_element
    press(served, Keys.SPACE)
    settle(served)
    assert opened.get_attribute("aria-expanded") == "true"
    detail = served.find_element(By.ID, opened.get_attribute("aria-controls"))
    assert detail.is_displayed()
    assert served.execute_script("return getComputedStyle(arguments[0]).outlineStyle", opened) == (
        "solid"
    )
    press(served, Keys.SPACE)
    assert not detail.is_displayed()


def test_tables_have_heads_and_controls_have_names(served):
    go(served, f"compare/{BEFORE}/{LAST}")
    nameless = served.execute_script("""
      const named = (one) => one.textContent.trim() || one.getAttribute("aria-label")
        || (one.labels && one.labels.length);
      const heads = [...document.querySelectorAll("table")].filter(
        (one) => one.tHead === null || !one.querySelector("thead th[scope=col]"));
      const pictures = [...document.querySelectorAll("svg")].filter(
        (one) => one.getAttribute("role") !== "img" || !one.getAttribute("aria-label"));
      const controls = [...document.querySelectorAll("a,button,input,select")].filter(
        (one) => !named(one));
      return [...heads, ...pictures, ...controls].map((one) => one.outerHTML.slice(0, 200));
    """)
    assert nameless == []


def test_a_name_of_markup_is_a_text(served):
    go(served, f"compare/{BEFORE}/{LAST}")
    room = served.find_element(By.ID, "compare-room")
    assert EVIL.split("\x1b", maxsplit=1)[0] in room.text
    assert served.find_elements(By.TAG_NAME, "img") == []


def test_what_is_open_stays_open_when_the_run_goes_on(served, run):
    go(served, f"tensors/{LAST}")
    assert find_shown(served, "#tensor-list")
    file = run / "events" / "agent.jsonl"
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace("aws: spot terminate", "gcp: preempted"), encoding="utf-8")
    WebDriverWait(served, 30, 0.1).until(
        lambda _: "gcp: preempted" in served.find_element(By.ID, "run").get_attribute("innerHTML")
    )
    assert find_shown(served, "#tensor-list")
    assert Select(served.find_element(By.ID, "of")).first_selected_option.text == LAST
