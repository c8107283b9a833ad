"""What a browser says of a page: texts that are faint or small, and what nobody can see."""

from __future__ import annotations

import time

from selenium.webdriver.common.by import By

from tests.services.browser import emulate

# https://www.w3.org/TR/WCAG21/#contrast-minimum
READABLE = 4.5
WIDE, NARROW = (1280, 1600), (400, 2400)
_TALLEST = 6000

# The contrast of each text with what it stands on.
CONTRASTS = """
const light = (rgb) => {
  const parts = rgb.map((one) => one / 255).map(
    (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
const ground = (one) => {
  for (; one; one = one.parentElement) {
    const found = rgb(getComputedStyle(one).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found.slice(0, 3);
  }
  return [255, 255, 255];
};
const TEXTS = "h1,h2,h3,p,b,span,th,td,dt,dd,li,a,label,button,select,strong,svg text";
const found = {};
for (const one of document.querySelectorAll(TEXTS)) {
  if (!one.textContent.trim() || !one.getClientRects().length) continue;
  const style = getComputedStyle(one);
  const ink = rgb(one.namespaceURI.endsWith("svg") ? style.fill : style.color).slice(0, 3);
  const pair = [light(ink), light(ground(one))].sort((a, b) => b - a);
  found[one.textContent.trim().slice(0, 40)] = (pair[0] + 0.05) / (pair[1] + 0.05);
}
return found;
"""
# What nobody can see: no size but for the dot of a single loss, or beyond what its part of the
# page can be moved to.
UNSEEN = """
return [...document.querySelectorAll("svg rect, .fault, .saved, polyline, .tile, .bar i, td")]
  .filter((one) => !one.closest("[hidden]"))
  .map((one) => [one, one.getBoundingClientRect(), one.closest(".scroll") || document.body])
  .filter(([one, box, part]) => {
    const right = part.getBoundingClientRect().left + part.scrollWidth;
    const isDot = one.matches("polyline") && parseFloat(getComputedStyle(one).strokeWidth) > 4;
    return (box.width + box.height <= 0 && !isDot) || box.right > right + 1 || box.left < 0;
  }).map(([one]) => one.outerHTML);
"""
SMALL = """
return [...document.querySelectorAll("svg text")]
  .filter((one) => !one.closest("[hidden]"))
  .filter((one) => one.getBoundingClientRect().height < 10).map((one) => one.textContent);
"""
# What is asked for while the page is open, and has not come yet.
BUSY = "return document.querySelectorAll('[aria-busy]').length"


def go(driver, address):
    """Open a part of the page, and wait for what it asks for."""
    driver.execute_script("location.hash = arguments[0]", address)
    settle(driver)


def settle(driver):
    """Wait until nothing is being asked for."""
    time.sleep(0.2)
    deadline = time.monotonic() + 60
    while driver.execute_script(BUSY):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def press(driver, key):
    driver.switch_to.active_element.send_keys(key)


def find_shown(driver, selector):
    """Return the elements that are seen."""
    return [
        element
        for element in driver.find_elements(By.CSS_SELECTOR, selector)
        if element.is_displayed()
    ]


def check_seen(driver, margin, scheme, picture):
    """Hold what is shown now against what people can see, and leave a picture of it."""
    emulate(driver, *margin, scheme)
    tall = driver.execute_script("return document.documentElement.scrollHeight")
    emulate(driver, margin[0], max(400, min(_TALLEST, tall)), scheme)
    # What was clicked before may have moved a table.
    driver.execute_script(
        "scrollTo(0, 0);for (const one of document.querySelectorAll('.scroll')) one.scrollLeft = 0"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    driver.save_screenshot(str(picture))
    assert driver.execute_script("return document.documentElement.scrollWidth") <= margin[0]
    assert driver.execute_script(UNSEEN) == []
    assert driver.execute_script(SMALL) == []
    tabs = {round(element.rect["y"]) for element in driver.find_elements(By.CSS_SELECTOR, "nav a")}
    assert len(tabs) <= 1, tabs
    faint = {
        text: element
        for text, element in driver.execute_script(CONTRASTS).items()
        if element < READABLE
    }
    assert not faint
