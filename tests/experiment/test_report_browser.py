"""The page of a report in a real browser."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiment.report_folders import a_run, curve
from fedbraid.experiment.collect import collect
from fedbraid.experiment.report import write_report

ARTIFACTS = Path(__file__).parents[2] / "artifacts"


@pytest.fixture(scope="module")
def browser():
    binary = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    yield made
    made.quit()


def screen(browser, width, height=900, scheme="light"):
    device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def load(browser, out):
    browser.get(out.as_uri())
    ready = "return document.documentElement.dataset.ready === 'true' && !!document.querySelector('.plot svg')"
    for _ in range(100):
        if browser.execute_async_script(
            f"const done = arguments[0]; requestAnimationFrame(() => done((() => {{{ready}}})()))"
        ):
            return
    raise AssertionError("the plots were not drawn")


def keep_picture(browser, name, scheme="light"):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    width = browser.execute_script("return window.innerWidth")
    screen(browser, width, height, scheme)
    ARTIFACTS.mkdir(exist_ok=True)
    browser.save_screenshot(str(ARTIFACTS / f"report-{name}.png"))


BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


def test_it_loads_without_a_word_and_asks_for_nothing(browser, page):
    screen(browser, 1100)
    browser.get_log("performance")
    load(browser, page[0])
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    shown = browser.execute_script(
        "return [...document.querySelectorAll('section:not([hidden]) h2')].map(h => h.textContent)"
    )
    assert shown == [
        "Results",
        "Curves",
        "Tuning",
        "Client by client",
        "What differs",
        "How they were run",
        "Methods",
        "Run it again",
    ]
    keep_picture(browser, "light")


def test_hovering_shows_the_values(browser, page):
    from selenium.webdriver import ActionChains, Keys

    screen(browser, 1100)
    load(browser, page[0])
    plot = browser.find_element("css selector", "#curves .plot")
    size = plot.size
    ActionChains(browser).move_to_element_with_offset(plot, size["width"] // 2 - 20, 0).perform()
    told = browser.find_element("css selector", "#curves .tip").text
    assert "round 40" in told
    fast, slow = curve(0.3, 0)[1][-1], (curve(0.1, 0)[1][-1] + curve(0.1, 1)[1][-1]) / 2
    assert re.search(rf"fast\s+{fast:.4g}", told)
    assert re.search(rf"slow\s+{slow:.4g}\s+\(", told)  # with its range over the seeds
    assert told.index("fast") < told.index("slow") if fast > slow else told.index("slow") < told.index("fast")
    cell = browser.find_element("css selector", "#tunings .cell")
    ActionChains(browser).move_to_element(cell).perform()
    assert "0.6" in browser.find_element("css selector", "#tunings .tip").text
    assert browser.find_elements("css selector", "#curves .tip") == []  # the pointer has left the plot
    browser.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.ARROW_RIGHT)
    assert "round 10" in browser.find_element("css selector", "#curves .tip").text  # by arrow keys, without a pointer


def test_toggles_change_what_is_drawn(browser, page):
    screen(browser, 1100)
    load(browser, page[0])

    def lines():
        return browser.execute_script(
            "return [...document.querySelectorAll('#curves .plot .line')].map(l => l.getAttribute('d'))"
        )

    def press(selector):
        browser.find_element("css selector", selector).click()

    first = lines()
    assert len(first) == 2
    press("#curves [data-value='bytes']")
    assert "bytes" in browser.find_element("css selector", "#curves .plot .label").text
    press("#curves [data-value='rounds']")
    assert lines() == first
    press("#curves .legend button:nth-child(2)")
    assert len(lines()) == 1
    press("#curves .legend button:nth-child(2)")
    buttons = {b.text: b for b in browser.find_elements("css selector", "#curves .controls > button")}
    buttons["each seed"].click()
    assert len(lines()) == 3
    buttons["each seed"].click()
    choice = browser.find_element("css selector", "#curves select")
    browser.execute_script("arguments[0].value = 'train/loss'; arguments[0].dispatchEvent(new Event('change'))", choice)
    assert buttons["log scale"].get_attribute("aria-pressed") == "true"
    # exp(-rate t) on a log scale is a straight line
    points = np.array([[float(v) for v in pair.split(",")] for pair in re.split("[ML]", lines()[0])[1:]])
    slopes = np.diff(points[:, 1]) / np.diff(points[:, 0])
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-2)
    assert browser.get_log("browser") == []


def test_a_click_sorts_by_a_column(browser, page):
    screen(browser, 1100)
    load(browser, page[0])
    table = browser.find_element("css selector", "table")

    def order():
        return [th.text for th in table.find_elements("css selector", "tbody th")]

    heads = {th.text: th for th in table.find_elements("css selector", "thead th")}
    heads["accuracy"].click()
    assert order() == ["slow", "fast"]
    assert heads["accuracy"].get_attribute("aria-sort") == "ascending"
    heads["accuracy"].click()
    assert order() == ["fast", "slow"]
    heads["loss"].click()
    assert order() == ["fast", "slow"]
    assert heads["accuracy"].get_attribute("aria-sort") is None


def test_curves_can_be_zoomed_and_smoothed(browser, page):
    from selenium.webdriver import ActionChains

    screen(browser, 1100)
    load(browser, page[0])
    choice = browser.find_element("css selector", "#curves select")
    browser.execute_script("arguments[0].value = 'train/loss'; arguments[0].dispatchEvent(new Event('change'))", choice)

    def ticks():
        found = browser.find_elements("css selector", "#curves .plot text[text-anchor=middle]:not(.label)")
        return [float(tick.text) for tick in found]

    whole = ticks()
    assert whole[-1] == 40
    plot = browser.find_element("css selector", "#curves .plot")
    ActionChains(browser).move_to_element_with_offset(plot, -200, 0).click_and_hold().move_by_offset(
        200, 0
    ).release().perform()
    assert min(ticks()) > 1
    assert max(ticks()) < 25  # a part of the first half
    buttons = {b.text: b for b in browser.find_elements("css selector", "#curves .controls .choices button")}
    buttons["all"].click()
    assert ticks() == whole
    buttons["zoom +"].click()
    assert max(ticks()) < 40
    buttons["zoom −"].click()
    assert ticks() == whole

    def heights():
        paths = browser.execute_script(
            "return [...document.querySelectorAll('#curves .line')].map(l => l.getAttribute('d'))"
        )
        return np.array([float(pair.split(",")[1]) for pair in re.split("[ML]", paths[0])[1:]])

    rough = heights()
    slider = browser.find_element("css selector", "#curves input[type=range]")
    browser.execute_script("arguments[0].value = 0.9; arguments[0].dispatchEvent(new Event('input'))", slider)
    smooth = heights()
    assert len(browser.find_elements("css selector", "#curves .raw")) == 2  # the values themselves stay visible
    assert smooth[0] == pytest.approx(rough[0], abs=0.5)  # no bias towards 0
    assert smooth[-1] < rough[-1]  # the mean of a falling curve lags behind it; y points down
    assert browser.get_log("browser") == []


def test_nothing_is_hidden_on_a_screen_of_1400_pixels(browser, folders, tmp_path):
    wide = a_run(tmp_path / "a run with quite a long name", "algorithm.name=scaffold", rate=0.2, own="lower")
    write_report(collect([*folders, wide]), tmp_path / "r.html", plots=False)
    screen(browser, 1400)
    load(browser, tmp_path / "r.html")
    hidden = "return [...document.querySelectorAll('.frame')].filter(f => f.scrollWidth > f.clientWidth).length"
    assert browser.execute_script(hidden) == 0
    tops = "return ['legend', 'plot'].map(c => document.querySelector(`#curves .${c}`).offsetTop)"
    assert np.diff(browser.execute_script(tops)) > 0
    named = "return [...document.querySelectorAll('#curves .plot .label')].map(t => t.textContent)"
    assert browser.execute_script(named) == ["round (number)", "test accuracy (higher is better)"]
    keep_picture(browser, "wide")


def test_light_and_dark_follow_the_system_and_the_button(browser, page):
    screen(browser, 1100, scheme="dark")
    load(browser, page[0])
    dark = browser.execute_script(BACKGROUND)
    assert sum(map(int, re.findall(r"\d+", dark))) < 120
    keep_picture(browser, "dark", "dark")
    browser.find_element("id", "theme").click()
    light = browser.execute_script(BACKGROUND)
    assert light == "rgb(255, 255, 255)"
    browser.find_element("id", "theme").click()
    assert browser.execute_script(BACKGROUND) == dark


def test_a_phone_can_read_it(browser, page):
    screen(browser, 390)
    load(browser, page[0])
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    small = browser.execute_script(
        "return [...document.querySelectorAll('button, select')].filter(b => b.offsetHeight < 34).length"
    )
    assert small == 0
    keep_picture(browser, "phone")
