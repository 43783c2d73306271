"""A stand-in of the API that the page asks, and what a person does with the page."""

import base64
import contextlib
import io
import json
import shutil
import threading
import time

import anyio
import pytest
import uvicorn
from PIL import Image
from playwright import sync_api
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from keras_preact.serving import webpage

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")

#: Milliseconds for the browser to do what it was told: Playwright's own 5 seconds can be too short
#: on busy cores.
PATIENCE = 20_000
sync_api.expect.set_options(timeout=PATIENCE)

EVIL = "<img src=x onerror=document.title='broken'>"
RESULTS = [["tabby cat", 0.75], ["fox", 0.2], [EVIL, 0.0375], ["mug", 0.0001]]


def model(name="cifar", versions=(3,), state="AVAILABLE", takes_images=True):
    return {
        "name": name,
        "versions": [{"version": str(version), "state": state} for version in versions],
        "classes": 10,
        "input": {"shape": [None, 32, 32, 3]},
        "takes_images": takes_images,
    }


class Api:
    """What the server answers, and what it was asked."""

    def __init__(self):
        self.models = [model()]
        self.token = None
        self.refusal = None  # (status, headers)
        self.asked = []  # (path below /v1/models/, image)
        self.go = threading.Event()
        self.go.set()
        self.now = self.most = 0
        routes = [
            Route("/v1/models", self.list),
            Route("/v1/models/{rest:path}", self.classify, methods=["POST"]),
        ]
        self.app = Starlette(routes=[*webpage.routes, *routes])

    def unauthorized(self, request):
        return self.token and request.headers.get("Authorization") != f"Bearer {self.token}"

    async def list(self, request):
        if self.unauthorized(request):
            return JSONResponse({"error": "no"}, 401)
        return JSONResponse({"models": self.models})

    async def classify(self, request):
        examples = json.loads(await request.body())["examples"]
        image = base64.b64decode(examples[0]["image_bytes"]["b64"])
        self.asked.append((request.path_params["rest"], image))
        self.now += 1
        self.most = max(self.most, self.now)
        await anyio.to_thread.run_sync(self.go.wait)
        self.now -= 1
        if self.unauthorized(request):
            return JSONResponse({"error": "no"}, 401)
        if self.refusal:
            return JSONResponse(
                {"error": f"said the server {EVIL}"}, self.refusal[0], self.refusal[1]
            )
        width = Image.open(io.BytesIO(image)).width  # each image its own answer
        return JSONResponse(
            {"results": [[[f"width {width}", 0.9], *RESULTS]] if width != 32 else [RESULTS]}
        )


@contextlib.contextmanager
def serving(app):
    """Serve an app on a free port, and give its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended at its start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def chromium():
    """A browser without a window."""
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@contextlib.contextmanager
def watched(browser, address):
    """A page of the browser; afterwards: nothing left the server's origin, nothing
    failed but what the server refused.
    """
    context = browser.new_context()
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE)
    requests, complaints = [], []
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "console",
        lambda message: (
            complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    yield tab
    title = tab.title()
    context.close()
    assert all(url.startswith((address, "blob:", "data:")) for url in requests), requests
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
    assert title == "Classify images"


def png(width=32, height=32):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(file, "PNG")
    return file.getvalue()


TRANSFER = """files => {
    const transfer = new DataTransfer();
    for (const [name, data] of files) {
        const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
        transfer.items.add(new File([bytes], name));
    }
    return transfer;
}"""


def transfer(tab, *files):
    return tab.evaluate_handle(
        TRANSFER, [[name, base64.b64encode(data).decode()] for name, data in files]
    )


def drop(tab, *files):
    tab.dispatch_event("#drop", "drop", {"dataTransfer": transfer(tab, *files)})


def opened(tab, address):
    tab.goto(address)
    sync_api.expect(tab.locator("#about")).to_be_visible()
    return tab


def rows(card):
    """The classes, percentages and lengths of the bars (parts of the whole length) of a
    card.
    """
    sync_api.expect(card).to_have_attribute("data-state", "answered")
    return card.locator("ol li").evaluate_all("""rows => rows.map(row => {
        const width = selector => row.querySelector(selector).offsetWidth;
        const text = selector => row.querySelector(selector).textContent;
        return [text(".name"), text(".score"), width(".bar") / width(".track")];
    })""")


def percent(score):
    """What the page writes for a score."""
    return "< 0.1\xa0%" if 0 < score < 0.0005 else f"{100 * score:.1f}\xa0%"
