"""The page in a real Chromium."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, Route, expect, sync_playwright

from steptron_metrics.access import Access, load_tokens
from steptron_metrics.http.app import build_app
from steptron_metrics.http.server import HttpServer, start
from steptron_metrics.settings import Settings
from tests.metrics_server.http.conftest import blow_up
from tests.metrics_server.http.fakes import FakeStore, some_alerts, some_state

TOOLS = Path(__file__).parents[3] / "tools"
TOKEN = "t" * 24
SECONDS = 20_000
TITLES = (
    "Loss",
    "Throughput",
    "All layers",
    "Largest over median",
    "Least over median",
    "Level of a layer",
    "Level beside other layers",
    "Straggler factor",
    "Routing confidence",
    "Losses of the MTP depths",
    "Time of each rank",
    "Partial iterations",
)
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = subprocess.run(
        ["sh", TOOLS / "chromium_for_tests.sh"], check=True, stdout=subprocess.PIPE, text=True, timeout=280
    )
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=found.stdout.strip(), args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def store() -> FakeStore:
    run = blow_up()
    first, ended = some_alerts(run)
    return FakeStore(run, alerts=[first, replace(ended, saw=HOSTILE, subject=HOSTILE)])


@pytest.fixture
def serve(tmp_path: Path, store: FakeStore) -> Iterator[Callable[..., HttpServer]]:
    servers = []

    def begin(access: Access | None = None) -> HttpServer:
        settings = Settings(folder=tmp_path, http_port=0)
        servers.append(start(settings, build_app(settings, store, access or Access(None), some_state)))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


class Watched:
    """A page of a browser, with everything that it asked for and complained about."""

    def __init__(self, browser: Browser, server: HttpServer, **options: Any) -> None:
        self.server = server
        self.context = browser.new_context(viewport={"width": 1300, "height": 900}, **options)
        self.context.set_default_timeout(SECONDS)
        self.requests: list[Request] = []
        self.complaints: list[str] = []
        self.page = self.open()

    def open(self) -> Page:
        page = self.context.new_page()
        page.on("request", lambda request: self.requests.append(request))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)
        return page

    def _console(self, message: ConsoleMessage) -> None:
        expected = (
            "401" in message.text or "getImageData" in message.text
        )  # a token that is missing; this test's own reading
        if message.type in ("error", "warning") and not expected:
            self.complaints.append(message.text)

    def go(self, fragment: str, page: Page | None = None) -> Page:
        page = page or self.page
        page.goto(f"{self.server.url}{fragment}")
        return page

    def run(self, query: str = "") -> Page:
        page = self.go(f"#/run/blow-up{query}")
        page.wait_for_selector(".tile-value")
        return page

    def close(self) -> None:
        self.context.close()
        assert not self.complaints
        outside = [request.url for request in self.requests if not request.url.startswith(self.server.url)]
        assert not outside and self.requests


@pytest.fixture
def watch(browser: Browser, serve: Callable[..., HttpServer]) -> Iterator[Callable[..., Watched]]:
    pages: list[Watched] = []

    def begin(access: Access | None = None, **options: Any) -> Watched:
        pages.append(Watched(browser, serve(access), **options))
        return pages[-1]

    yield begin
    for page in pages:
        page.close()


def until(page: Page, condition: str) -> None:
    """Waits for a condition; the page's policy forbids Playwright's own way."""
    deadline = time.monotonic() + SECONDS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {SECONDS} ms: {condition}"
        page.wait_for_timeout(30)


def settled(page: Page) -> None:
    """Waits until nothing that can be seen is loading, and has been drawn."""
    until(
        page,
        "!!document.querySelector('.panel[data-state=ready]') && !document.querySelector('.panel[data-state=loading]')",
    )
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


LARGE = ".panel:has(.colour-bar) .plot"  # the first one: the enlarged heat map


def large(page: Page) -> Locator:
    """The enlarged heat map, in sight and drawn."""
    plot = page.locator(LARGE).first
    plot.scroll_into_view_if_needed()
    settled(page)
    until(page, f"!!document.querySelector({LARGE!r}).dataset.items")
    return plot


def place(page: Page, selector: str, iteration: float, part: float) -> tuple[float, float]:
    """Where an iteration, and a part of the height, are on the screen."""
    plot = page.locator(selector).first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    data = {name: float(value) for name, value in plot.evaluate("plot => ({...plot.dataset})").items()}
    assert box is not None
    across = (iteration - data["from"] + 0.5) / (data["to"] - data["from"] + 1)
    return box["x"] + data["left"] + across * data["width"], box["y"] + data["top"] + part * data["height"]


# Colours at the middles of rows, at parts of the width.
PIXELS = """(plot, [rows, parts]) => {
  const canvas = plot.querySelector("canvas.data"), scale = canvas.width / plot.clientWidth;
  const [left, top, width, height] = ["left", "top", "width", "height"].map(name => Number(plot.dataset[name]) * scale);
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return parts.map(part => Array.from({length: rows}, (_, row) => {
    const x = Math.round(left + part * width), y = Math.round(top + (row + 0.5) / rows * height);
    return [...data.slice((y * canvas.width + x) * 4, (y * canvas.width + x) * 4 + 4)];
  }));
}"""


def luminance(colour: list[float]) -> float:
    """Relative luminance of sRGB, WCAG 2.2."""
    parts = np.asarray(colour[:3], float) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_everything_is_drawn_and_nothing_comes_from_elsewhere(watch: Callable[..., Watched]) -> None:
    watched = watch()
    page = watched.run()
    for _ in range(12):
        settled(page)
        page.mouse.wheel(0, 700)
    until(page, "[...document.querySelectorAll('.panel')].every(panel => panel.dataset.state === 'ready')")
    settled(page)
    titles = page.locator(".panel h3").all_inner_texts()
    for wanted in TITLES:
        assert wanted in titles
    joined = "\n".join(titles)
    for wanted in ("Weight norm: expert down", "Update norm: expert down", "Muon's largest intermediate: expert down"):
        assert wanted in joined
    colours = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map(plot => {
          const canvas = plot.querySelector("canvas.data");
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        })"""
    )
    assert len(colours) > 20 and min(colours) > 8
    slowest = page.locator(".panel:has-text('Time of each rank') tbody tr").first.locator("td").all_inner_texts()
    assert slowest[0] == "5" and 1.6 < float(slowest[3].removesuffix(" ×")) < 2.0
    assert page.locator(".panel:has-text('Partial iterations') tbody tr").all_inner_texts() == [
        "21\t7 of 8\t3",
        "20\t7 of 8\t3",
    ]
    assert page.title() == "blow-up – Steptron metrics" and page.locator(".alert img, .alert script").count() == 0
    assert HOSTILE in page.locator("#alerts .alert.ended .saw").inner_text()


def test_the_expert_that_blows_up_is_bright_where_it_is(watch: Callable[..., Watched]) -> None:
    page = watch().run("?layer=5")
    plot = large(page)
    assert plot.get_attribute("data-items") == "16"
    for scale in ("shared", "own"):
        page.get_by_label("colour scale").select_option(scale)
        settled(page)
        early, late = plot.evaluate(PIXELS, [16, [0.1, 0.99]])
        bright = [luminance(colour) for colour in late]
        assert bright[7] > 0.6 and bright[7] > 2 * max(bright[:7] + bright[8:]), scale
        assert luminance(early[7]) < 0.5 * bright[7], scale
    page.get_by_label("colour scale").select_option("relative")
    settled(page)
    early, late = plot.evaluate(PIXELS, [16, [0.1, 0.99]])
    red, _, blue, _ = late[7]  # blue below the median, orange above
    assert red > blue + 100 and late[7] not in early
    small = page.locator(".thumb[data-layer='4']").inner_text()
    assert "layer 4" in small and "↓ 0.00" in small  # the one in which an expert collapses


def test_what_the_pointer_is_over_is_told(watch: Callable[..., Watched], store: FakeStore) -> None:
    page = watch().run("?layer=5")
    large(page)
    for iteration, expert in ((150, 7), (20, 2)):
        page.mouse.move(*place(page, LARGE, iteration, (expert + 0.5) / 16))
        tip = page.locator(LARGE).first.locator(".tip")
        expect(tip).to_be_visible()
        text = tip.inner_text()
        values = store.points("blow-up", "moe.output_norm_max", 5, "max", iteration, iteration, 1).values[0]
        assert f"iteration {iteration}" in text
        told = re.search(rf"expert {expert}: ([\d.,]+)", text)
        assert told and abs(float(told[1].replace(",", "")) / values[expert] - 1) < 0.005
        ratio = re.search(r"([\d.,]+) × the median", text)
        assert ratio and abs(float(ratio[1].replace(",", "")) / (values[expert] / np.median(values)) - 1) < 0.006
    # The other plots show where the pointer is: their legends tell the values there.
    loss = store.points("blow-up", "train.lm_loss", -1, "mean", 20, 20, 1).values[0, 0]
    key = page.locator(".panel:has(h3:text-is('Loss')) .key b").first.inner_text()
    assert abs(float(key) / loss - 1) < 0.005


def test_a_link_restores_the_view_and_back_goes_back(watch: Callable[..., Watched]) -> None:
    watched = watch()
    page = watched.run()
    settled(page)
    page.get_by_label("quantity").select_option("moe.intermediate_norm_rms")
    page.get_by_label("colour scale").select_option("relative")
    page.get_by_role("button", name=re.compile("^layer 4")).click()
    large(page)
    page.mouse.click(*place(page, LARGE, 60, 2.5 / 16))
    expect(page.locator("h3:text-is('Layer 4, expert 2')")).to_be_visible()
    settled(page)
    start, stop = place(page, LARGE, 50, 0.5), place(page, LARGE, 149, 0.5)
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*stop, steps=4)
    page.mouse.up()
    settled(page)
    link = page.url
    for part in ("metric=moe.intermediate_norm_rms", "scale=relative", "layer=4", "items=2", "from=5", "to=14"):
        assert part in link
    view = _view(page)
    other = watched.open()
    other.goto(link)
    other.wait_for_selector(".tile-value")
    large(other)
    assert _view(other) == view
    other.close()
    page.go_back()
    expect(page.get_by_label("last iteration shown; empty: follow the run")).to_have_value("")
    assert "items=2" in page.url and "from=" not in page.url
    page.go_back()
    expect(page.locator("h3:text-is('Layer 4, expert 2')")).to_have_count(0)
    page.go_forward()
    page.go_forward()
    settled(page)
    assert _view(page) == view


def _view(page: Page) -> dict[str, Any]:
    selects = page.locator("#experts .controls select").evaluate_all("all => all.map(one => one.value)")
    plots = page.locator(".plot:not(.small)").evaluate_all(
        "all => all.map(plot => [plot.dataset.from, plot.dataset.to])"
    )
    chosen = page.locator("#experts h3").all_inner_texts()
    # Plots that have not been in sight yet have not been drawn.
    return {"selects": selects, "plots": {tuple(one) for one in plots if one[0]}, "titles": chosen}


def test_dragging_zooms_all_plots_and_a_double_click_undoes_it(watch: Callable[..., Watched]) -> None:
    watched = watch()
    page = watched.run()
    settled(page)
    loss = ".panel:has(h3:text-is('Loss')) .plot"
    start, stop = place(page, loss, 101, 0.5), place(page, loss, 120, 0.5)
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*stop, steps=3)
    page.mouse.up()
    settled(page)
    assert page.url.endswith("from=101&to=120")
    ranges = page.locator(".plot[data-from]").evaluate_all(
        "all => all.map(plot => plot.dataset.from + ' ' + plot.dataset.to)"
    )
    assert len(ranges) > 4 and set(ranges) == {"101 120"}
    asked = [request.url for request in watched.requests if "/points" in request.url]
    assert "first=101&last=120" in asked[-1]
    page.mouse.dblclick(*place(page, loss, 110, 0.5))
    settled(page)
    assert "from=" not in page.url and page.locator(loss).get_attribute("data-to") == "200"


def test_the_keyboard_suffices(watch: Callable[..., Watched]) -> None:
    page = watch().run("?layer=5&items=1")
    heat = large(page).locator("canvas.over")
    heat.focus()
    page.keyboard.press("ArrowDown")
    tip = page.locator(LARGE).first.locator(".tip")
    expect(tip).to_contain_text("iteration 200")
    before = re.search(r"expert (\d+)", tip.inner_text())
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    expect(tip).not_to_contain_text("iteration 200")
    after = re.search(r"expert (\d+)", tip.inner_text())
    assert before and after and int(after[1]) == int(before[1]) - 1
    page.keyboard.press("Enter")
    expect(page.locator(f"h3:text-is('Layer 5, expert 1, {after[1]}')")).to_be_visible()
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))
    unnamed = page.locator("button, select, input, [role=img]").evaluate_all(
        "all => all.filter(one => !(one.ariaLabel || one.textContent.trim())).map(one => one.outerHTML)"
    )
    assert not unnamed


def test_a_token_is_asked_for_once(watch: Callable[..., Watched], tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(f"- {{token: {TOKEN}, may: [read]}}\n")
    file.chmod(0o600)
    watched = watch(load_tokens(file))
    page = watched.go("#/run/blow-up")
    field = page.get_by_label("token").locator("visible=true").last
    page.locator("dialog.token input").fill("wrong" * 5)
    page.keyboard.press("Enter")
    expect(page.locator("dialog.token")).to_contain_text("not one of the server's")
    assert field.get_attribute("type") == "password"
    page.locator("dialog.token input").fill(TOKEN)
    page.get_by_role("button", name="Go on").click()
    page.wait_for_selector(".tile-value")
    settled(page)
    assert page.locator("dialog.token").count() == 0 and TOKEN not in page.url
    page.reload()
    page.wait_for_selector(".tile-value")
    assert page.locator("dialog.token").count() == 0
    other = watched.context.new_page()  # kept for the tab, not for the browser
    other.goto(watched.server.url)
    other.wait_for_selector("dialog.token input")
    page.get_by_role("button", name="Forget token").click()
    page.wait_for_selector("dialog.token input")
    assert not any(TOKEN in request.url for request in watched.requests)


CONTRAST = """() => {
  const parse = text => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(") ? parts.map((part, i) => i < 3 ? part * 255 : part) : parts;
  };
  const backdrop = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(".visually-hidden, .skip")) continue;
    found.push([element.tagName + "." + element.className + ": " + element.textContent.slice(0, 40),
                parse(getComputedStyle(element).color), backdrop(element)]);
  }
  return found;
}"""


def test_text_stands_out_in_both_themes(watch: Callable[..., Watched]) -> None:
    watched = watch(color_scheme="light")
    page = watched.run()
    settled(page)
    for fragment, selector in (("#/run/blow-up", ".alert"), ("#/runs", ".run-name"), ("#/server", "td")):
        watched.go(fragment)
        page.locator(selector).first.wait_for()
        for scheme, paper in (("light", "rgb(245, 246, 244)"), ("dark", "rgb(14, 17, 21)")):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            until(page, f"getComputedStyle(document.body).backgroundColor === {paper!r}")
            found = page.evaluate(CONTRAST)
            assert len(found) > 10
            for what, ink, under in found:
                bright, dim = sorted((luminance(ink), luminance(under)), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, f"{what} of {fragment}, {scheme}: {ink} on {under}"


def test_the_theme_follows_the_system_until_it_is_chosen(watch: Callable[..., Watched]) -> None:
    watched = watch(color_scheme="dark")
    page = watched.run()
    back = "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number)"
    assert luminance(page.evaluate(back)) < 0.05
    page.emulate_media(color_scheme="light")
    until(page, f"{back}[0] > 200")
    page.get_by_role("button", name="switch to the dark theme").click()
    until(page, f"{back}[0] < 30")
    assert "theme=dark" in page.url
    page.reload()
    page.wait_for_selector(".tile-value")
    assert luminance(page.evaluate(back)) < 0.05


def test_ramps_get_brighter_throughout_and_lines_stand_out(watch: Callable[..., Watched]) -> None:
    page = watch().go("#/runs")
    ramps, lines = page.evaluate(
        """async () => {
          const {RAMPS, DIVERGING, lineColour, layerColour} = await import("/page/js/colour.js");
          const lines = {};
          for (const theme of ["light", "dark"]) {
            lines[theme] = [0, 1, 2, 3, 4, 5, 6].map(index => lineColour(index, theme));
            lines[theme].push(...[0, 0.5, 1].map(part => layerColour(part, theme)));
          }
          return [{...RAMPS, below: DIVERGING.light.slice(0, 129), above: DIVERGING.light.slice(127).reverse()}, lines];
        }"""
    )
    for name, ramp in ramps.items():
        bright = np.array([luminance(colour) for colour in ramp])
        assert (np.diff(bright) > -0.004).all() and bright[-1] - bright[0] > 0.5, name
    papers = {"light": [255, 255, 255], "dark": [22, 26, 32]}
    for theme, colours in lines.items():
        for colour in colours:
            bright, dim = sorted((luminance(colour), luminance(papers[theme])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 2.2, f"{colour} in {theme}"


def test_a_live_run_goes_on(watch: Callable[..., Watched], store: FakeStore) -> None:
    watched = watch()
    page = watched.run()
    settled(page)
    expect(page.locator(".tile-value").first).to_have_text("200")
    store.fakes["blow-up"].iterations = 215
    expect(page.locator(".tile-value").first).to_have_text("215")
    expect(page.locator("#top .live")).to_contain_text("iteration 215")
    expect(page.locator(".panel:has(h3:text-is('Loss')) .plot")).to_have_attribute("data-to", "215")
    store.delete("blow-up")
    expect(page.locator("#top .live")).to_have_text("no answer from the server")
    watched.complaints = [text for text in watched.complaints if "404" not in text]


def test_a_narrow_window_has_no_sideways_scrolling(watch: Callable[..., Watched]) -> None:
    watched = watch()
    page = watched.page
    page.set_viewport_size({"width": 380, "height": 800})
    for fragment in ("#/run/blow-up", "#/runs", "#/server"):
        watched.go(fragment)
        page.wait_for_selector(".tile-value, .run-name")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), fragment


def test_runs_are_listed_opened_and_deleted(watch: Callable[..., Watched], store: FakeStore) -> None:
    watched = watch()
    page = watched.go("")
    page.get_by_role("link", name="blow-up").wait_for()
    store.fakes["blow-up"].last_ended_ns = 10**18
    page.get_by_role("button", name="Delete …").click()
    page.get_by_role("button", name="Keep it").click()
    assert "blow-up" in store.fakes
    page.get_by_role("link", name="blow-up").click()
    page.wait_for_selector(".tile-value")
    page.go_back()
    page.get_by_role("button", name="Delete …").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("main")).to_contain_text("No run yet")
    assert not store.fakes


def test_how_the_server_does(watch: Callable[..., Watched]) -> None:
    page = watch().go("#/server")
    expect(page.locator(".tile").first).to_contain_text("waiting")
    tiles = page.locator(".tile").all_inner_texts()
    assert any("given up" in tile and "5" in tile for tile in tiles) and any("3 GiB" in tile for tile in tiles)
    assert "512" in page.locator(".panel:has-text('Receivers')").inner_text()
    expect(page.locator(".alerts .alert")).to_have_count(1)
    rows = page.locator(".panel:has-text('Waiting') tbody tr")
    expect(rows.first).to_contain_text("rank 2, 5")


def test_the_ranks_that_a_run_waits_for_are_named_on_its_page(watch: Callable[..., Watched]) -> None:
    watched = watch()
    page = watched.go("#/run/blow-up")
    expect(page.locator(".waiting")).to_contain_text("Iteration 201 waits for rank 2, 5; its first frame came")

    def no_more(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"waiting": []})

    page.route("**/api/v1/server", no_more)
    expect(page.locator(".waiting")).to_be_hidden()


def test_what_keeps_the_server_from_storing_is_shown(watch: Callable[..., Watched]) -> None:
    watched = watch()

    def troubled(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(
            response=answer, json=answer.json() | {"trouble": "database <b>x</b> is not reached", "set_aside": 3}
        )

    watched.page.route("**/api/v1/server", troubled)
    page = watched.go("#/server")
    expect(page.get_by_role("alert")).to_contain_text("Nothing is stored: database <b>x</b> is not reached")
    assert any("set aside" in tile and "3" in tile for tile in page.locator(".tile.alarmed").all_inner_texts())
