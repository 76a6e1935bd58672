"""The inspector and the report in a real browser: `make test-browser`.

Chromium is found by its name, or by RSV_CHROMIUM. With RSV_SCREENSHOTS=FOLDER, pictures to look at are left there.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import rsv_format
from rsv_format.report import describe, write_report

ROOT = Path(__file__).resolve().parents[1]
SCREENS = {"desktop": (1200, 900), "phone": (390, 844)}
LAYERS = [f"model.layers.{i}.mlp.{part}_proj" for i in range(12) for part in ("up", "down")]


class Handler(SimpleHTTPRequestHandler):
    """The repository, and files that give ranges, of which it keeps count."""

    ranges: list[tuple[int, int]] = []

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None or "whole" in self.path or not Path(self.translate_path(self.path)).is_file():
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        start, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        self.ranges.append((start, last))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - start))
        self.end_headers()
        self.wfile.write(data[start : last + 1])

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = os.environ.get("RSV_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "there is no chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's pages and some files."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("inspect", "rsv_format", "conformance", "SPEC.md"):
        (folder / name).symlink_to(ROOT / name)
    rng = np.random.default_rng(1)
    layers = [
        rsv_format.quantize_matrix(
            rng.standard_normal((256, 128)).astype(np.float32), name=name, importance=rng.uniform(0.5, 2, 128)
        )
        for name in LAYERS
    ]
    tensors = {f"model.layers.{i}.norm.weight": rsv_format.TensorData("f32", np.ones(128, "<f4")) for i in range(12)}
    rsv_format.write(folder / "a.rsv", layers=layers, tensors=tensors, metadata={"name": "<b>bold</b>"})
    data = bytearray((folder / "a.rsv").read_bytes())
    data[-20000] ^= 1
    (folder / "damaged.rsv").write_bytes(data)
    (folder / "cut.rsv").write_bytes(data[:-1])
    (folder / "whole.rsv").write_bytes((folder / "a.rsv").read_bytes())
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=[(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")], ids="-".join)
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of which no script fails and that nothing is wider than."""
    screen, scheme = request.param
    width, height = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert troubles == []
    if pictures := os.environ.get("RSV_SCREENSHOTS"):
        name = re.sub(r"\W+", "-", request.node.name).strip("-")
        page.screenshot(path=Path(pictures) / f"{name}.png", full_page=True)
    context.close()


def test_a_file_is_drawn(page: Page, site: str, folder: Path) -> None:
    page.goto(f"{site}/inspect/")
    page.set_input_files("#file", folder / "a.rsv")
    expect(page.locator("h1")).to_have_text("a.rsv")
    expect(page.locator("svg.map rect")).to_have_count(24 + 12 + 4)  # and codebooks, diagonals, header, padding
    expect(page.locator("#layer .card svg")).to_have_count(3)
    expect(page.locator("td", has_text="<b>bold</b>")).to_be_visible()
    page.locator("button", has_text="next").click()
    expect(page.locator("#layer h2")).to_have_text("model.layers.1.mlp.down_proj")
    expect(page.locator("#layer .card svg")).to_have_count(3)
    page.locator("svg.map rect").first.click()
    expect(page.locator("svg.map rect.chosen")).to_have_count(1)
    page.get_by_text("Verify all of it").click()
    expect(page.locator("#verified")).to_have_text(re.compile("sound"))


def test_a_report_is_drawn_without_a_network(page: Page, folder: Path, tmp_path: Path) -> None:
    with rsv_format.open(folder / "a.rsv") as file:
        write_report(tmp_path / "r.html", describe(file, "a.rsv"))
    page.context.set_offline(True)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "r.html").as_uri())
    expect(page.locator("h1")).to_have_text("a.rsv")
    expect(page.locator("svg.map rect")).to_have_count(24 + 12 + 4)
    expect(page.locator("section", has_text="Codes against the ideal").locator(".card")).to_have_count(2)
    assert len(requests) == 1


@pytest.fixture
def desk(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def test_a_url_is_read_by_ranges(desk: Page, site: str, folder: Path) -> None:
    desk.goto(f"{site}/inspect/")
    Handler.ranges.clear()
    desk.fill("input[name=url]", f"{site}/a.rsv")
    desk.locator("#url button").click()
    expect(desk.locator("#layer .card svg")).to_have_count(3)
    read = sum(last + 1 - start for start, last in Handler.ranges)
    assert read < (folder / "a.rsv").stat().st_size / 4


def test_a_server_without_ranges_is_told_so(desk: Page, site: str) -> None:
    desk.goto(f"{site}/inspect/")
    for name in ("whole.rsv", "nothing.rsv"):
        desk.fill("input[name=url]", f"{site}/{name}")
        desk.locator("#url button").click()
        expect(desk.locator("li.bad")).to_have_text(re.compile(f"{name}: status"))


def test_faults_have_their_code_and_rule(desk: Page, site: str, folder: Path) -> None:
    desk.goto(f"{site}/inspect/")
    desk.set_input_files("#file", folder / "cut.rsv")
    expect(desk.locator("#fault code")).to_have_text("file_truncated")
    expect(desk.locator("#fault a")).to_have_text("RSV-106")
    with desk.expect_navigation():
        desk.locator("#fault a").click()
    assert "/SPEC.md" in desk.url
    desk.goto(f"{site}/inspect/")
    desk.set_input_files("#file", folder / "damaged.rsv")
    desk.get_by_text("Verify all of it").click()
    expect(desk.locator("#fault code")).to_have_text("blob_digest_mismatch")


def test_a_file_can_be_dropped(desk: Page, site: str, folder: Path) -> None:
    desk.goto(f"{site}/inspect/")
    transfer = desk.evaluate_handle(
        """async (url) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([await (await fetch(url)).blob()], "dropped.rsv"));
          return transfer;
        }""",
        f"{site}/a.rsv",
    )
    desk.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(desk.locator("h1")).to_have_text("dropped.rsv")
