"""The page at `/`, in a real browser, over a small stand-in of the API that it asks."""

import contextlib
import re

import pytest
from playwright import sync_api

from tests.keras_preact.serving.page_api import (
    EVIL,
    RESULTS,
    Api,
    chromium,
    drop,
    model,
    needs_browser,
    opened,
    png,
    rows,
    serving,
    transfer,
    watched,
)


@pytest.fixture
def api():
    return Api()


@pytest.fixture
def address(api):
    with serving(api.app) as url:
        yield url
        api.go.set()


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser, address):
    with watched(browser, address) as tab:
        yield tab


# ---- images in, classes out


@needs_browser
@pytest.mark.parametrize("way", ["drop", "choose", "paste"])
def test_shows_the_classes_of_an_image(tab, address, api, way):
    opened(tab, address)
    if way == "drop":
        drop(tab, ("cat.png", png()))
    elif way == "choose":
        tab.set_input_files(
            "#files", [{"name": "cat.png", "mimeType": "image/png", "buffer": png()}]
        )
    else:
        tab.evaluate(
            "data => document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data}))",
            transfer(tab, ("cat.png", png())),
        )
    card = tab.locator(".card")
    shown = rows(card)
    assert [(name, score) for name, score, _ in shown] == [
        ("tabby cat", "75.0\xa0%"),
        ("fox", "20.0\xa0%"),
        (EVIL, "3.8\xa0%"),
        ("mug", "< 0.1\xa0%"),
    ]
    assert [bar for *_, bar in shown] == pytest.approx([score for _, score in RESULTS], abs=0.01)
    assert api.asked == [("cifar/versions/3:classify", png())]
    sync_api.expect(card.locator("h3")).to_have_text("cat.png")
    sync_api.expect(card.locator(".meta")).to_have_text(
        re.compile(r"^cifar, version 3 · [\d.]+\s(ms|s)$")
    )
    sync_api.expect(tab.locator("#said")).to_have_text("cat.png: tabby cat, 75.0\xa0%")
    assert card.locator("img").evaluate(
        "image => image.decode().then(() => [image.naturalWidth, image.className])"
    ) == [
        32,
        "tiny",
    ]


@needs_browser
def test_works_by_keyboard_alone(tab, address):
    # Playwright does not wait until the browser hands file choosers over, so an Enter right behind
    # the request can open a real one, which nobody sees. Asking at the start leaves it the rest of
    # the page's way.
    tab.on("filechooser", lambda chooser: None)
    opened(tab, address)
    tab.keyboard.press("Tab")
    assert tab.locator("#drop").evaluate("zone => getComputedStyle(zone).outlineStyle") == "solid"
    with tab.expect_file_chooser() as chooser:
        tab.keyboard.press("Enter")
    chooser.value.set_files([{"name": "cat.png", "mimeType": "image/png", "buffer": png()}])
    rows(tab.locator(".card"))
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")  # "Clear"
    sync_api.expect(tab.locator(".card")).to_have_count(0)
    assert tab.evaluate("document.activeElement.id") == "files"


@needs_browser
def test_asks_about_many_images_a_few_at_a_time(tab, address, api):
    opened(tab, address)
    api.go.clear()
    widths = list(range(40, 49))
    drop(tab, *((f"{width}.png", png(width)) for width in widths))
    sync_api.expect(tab.locator(".card[data-state=asking]")).to_have_count(3)
    sync_api.expect(tab.locator(".card[data-state=waiting]")).to_have_count(6)
    api.go.set()
    sync_api.expect(tab.locator(".card[data-state=answered]")).to_have_count(len(widths))
    cards = tab.locator(".card").all()
    assert [card.locator("h3").text_content() for card in cards] == [
        f"{width}.png" for width in widths
    ]
    assert [rows(card)[0][0] for card in cards] == [f"width {width}" for width in widths]
    assert api.most <= 3


@needs_browser
def test_asks_the_model_that_is_chosen(tab, address, api):
    api.models = [
        model("a b?c", (2, 11)),
        model("cifar"),
        model("numbers", takes_images=False),
        model("new", state="LOADING"),
    ]
    opened(tab, address)
    menu = tab.get_by_label("Model")
    options = ["a b?c, version 11", "a b?c, version 2", "cifar"]
    assert menu.locator("option").all_text_contents() == options
    for option in options:
        menu.select_option(option)
        drop(tab, ("cat.png", png()))
        rows(tab.locator(".card").first)
        sync_api.expect(tab.locator(".meta").first).to_contain_text(option)
        version = re.search(r"version \d+", tab.locator(".meta").first.text_content())[0]
        sync_api.expect(tab.locator("#about")).to_have_text(
            f"{version} · 10 classes · sees 32\xa0\xd7\xa032 pixels"
        )
    assert [path for path, _ in api.asked] == [
        "a b?c/versions/11:classify",
        "a b?c/versions/2:classify",
        "cifar/versions/3:classify",
    ]


# ---- what goes wrong


@needs_browser
@pytest.mark.parametrize(
    ("status", "headers", "text", "again"),
    [
        (400, {}, "This file could not be read as an image.", False),
        (413, {}, "This file is larger than the server takes.", False),
        (404, {}, "The server no longer has this model.", True),
        (429, {"Retry-After": "2"}, "The server is busy. Try again in 2 seconds.", True),
        (
            503,
            {"Retry-After": "0.5"},
            "The model cannot answer at the moment. Try again in a second.",
            True,
        ),
        (500, {}, "The server failed to answer (status 500).", True),
    ],
)
def test_tells_what_went_wrong(tab, address, api, status, headers, text, again):
    opened(tab, address)
    api.refusal = status, headers
    drop(tab, (f"{EVIL}.png", png()))
    card = tab.locator(".card")
    sync_api.expect(card).to_have_attribute("data-state", "failed")
    sync_api.expect(card.locator(".what")).to_have_text(text)
    sync_api.expect(card.locator(".detail")).to_have_text(f"said the server {EVIL}")
    sync_api.expect(card.locator("h3")).to_have_text(f"{EVIL}.png")
    api.refusal = None
    button = card.get_by_role("button", name="Try again")
    sync_api.expect(button).to_be_visible(visible=again)
    if again:
        button.click()
        assert rows(card)[0][0] == "tabby cat"


@needs_browser
def test_tells_when_the_server_is_gone(browser):
    with contextlib.ExitStack() as stack:
        with serving(Api().app) as address:
            tab = opened(stack.enter_context(watched(browser, address)), address)
        drop(tab, ("cat.png", png()))
        for place in (".what", "#notice"):
            sync_api.expect(tab.locator(place)).to_have_text(
                "The server does not answer. Is it still running?"
            )


@needs_browser
@pytest.mark.parametrize(
    ("models", "text"),
    [
        ([], "No model is ready yet. This page keeps looking."),
        ([model(state="LOADING")], "No model is ready yet. This page keeps looking."),
        ([model("numbers", takes_images=False)], "The model here, numbers, does not take images."),
        (
            [model("a", takes_images=False), model(EVIL, takes_images=False)],
            f"The models here, a, {EVIL}, do not take images.",
        ),
    ],
)
def test_waits_for_a_model_of_images(tab, address, api, models, text):
    api.models = models
    tab.clock.install()
    tab.goto(address)
    sync_api.expect(tab.locator("#notice")).to_have_text(text)
    drop(tab, ("cat.png", png()))
    sync_api.expect(tab.locator(".what")).to_have_text("No model is ready yet.")
    api.models = [model()]
    tab.clock.run_for(3000)
    sync_api.expect(tab.locator("#only-model")).to_have_text("cifar")
    sync_api.expect(tab.locator("#notice")).to_be_hidden()
    tab.get_by_role("button", name="Try again").click()
    rows(tab.locator(".card"))


@needs_browser
def test_asks_for_the_token_and_forgets_it(tab, address, api):
    api.token = "open sesame".replace(" ", "-")
    tab.goto(address)
    field = tab.get_by_label("The server asks for a token")
    sync_api.expect(field).to_be_focused()
    assert field.get_attribute("type") == "password"
    drop(tab, ("cat.png", png()))
    for wrong in ("wrong", "schlüssel", "\U0001f511"):
        field.fill(wrong)
        field.press("Enter")
        sync_api.expect(tab.locator("#notice")).to_have_text(
            "The server did not accept this token."
        )
        sync_api.expect(field).to_have_value("")
    field.fill(api.token)
    field.press("Enter")
    sync_api.expect(field).to_be_hidden()
    sync_api.expect(tab.locator("#notice")).to_be_hidden()
    drop(tab, ("dog.png", png(50)))
    assert rows(tab.locator(".card").first)[0][0] == "width 50"

    api.token = "another"  # and the images that met it go on by themselves once it is known
    drop(tab, ("fox.png", png(60)))
    sync_api.expect(field).to_be_focused()
    field.fill(api.token)
    field.press("Enter")
    assert rows(tab.locator(".card").first)[0][0] == "width 60"

    assert tab.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
        0,
        0,
        "",
    ]
    tab.reload()
    sync_api.expect(field).to_be_visible()


# ---- how it looks


CONTRASTS = """() => {
    const light = color => {
        const linear = x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = color.match(/[\\d.]+/g).map(x => linear(x / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = node => {
        const color = getComputedStyle(node).backgroundColor;
        return color.startsWith("rgba") ? ground(node.parentElement) : color;
    };
    return [...document.querySelectorAll("body *")]
        .filter(node => node.checkVisibility())
        .filter(node => [...node.childNodes].some(x => x.nodeType === 3 && x.data.trim()))
        .map(node => {
            const colors = [getComputedStyle(node).color, ground(node)].map(light);
            const [a, b] = colors.sort((x, y) => y - x);
            return [node.textContent.trim().slice(0, 30), (a + 0.05) / (b + 0.05)];
        });
}"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_is_readable_in_light_and_dark_and_fits_a_phone(tab, address, api, scheme):
    tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    tab.set_viewport_size({"width": 360, "height": 740})
    api.models = [model("a_name_without_an_end_" * 8), model()]
    api.token = "t"
    tab.goto(address)
    field = tab.get_by_label("The server asks for a token")
    sync_api.expect(field).to_be_visible()
    texts = tab.evaluate(CONTRASTS)
    field.fill("t")
    field.press("Enter")
    sync_api.expect(tab.locator("#model")).to_be_visible()
    drop(tab, ("word" * 60 + ".png", png()))
    rows(tab.locator(".card"))
    api.refusal = 503, {}
    drop(tab, ("dog.png", png(200)))
    sync_api.expect(tab.locator(".card").first).to_have_attribute("data-state", "failed")
    texts += tab.evaluate(CONTRASTS)
    assert (
        tab.evaluate(
            "Math.max(...[...document.querySelectorAll('body *')].map(x => "
            "x.getBoundingClientRect().right))"
        )
        <= 360
    )
    api.models = []
    tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    sync_api.expect(tab.locator("#notice")).to_be_visible()
    texts += tab.evaluate(CONTRASTS)
    assert len(texts) > 20
    assert [(text, ratio) for text, ratio in texts if ratio < 4.5] == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert (
        tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 23)"
    ) == (scheme == "dark")
    assert (
        tab.locator(".bar").first.evaluate("bar => getComputedStyle(bar).animationName") == "none"
    )


# ---- its files


@needs_browser
def test_the_policy_holds_the_browser(browser, address):
    tab = opened(browser.new_page(), address)
    tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')"
    )
    tab.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = 1";
        document.body.append(script);
    }""")
    with serving(Api().app) as other:
        assert (
            tab.evaluate("url => fetch(url, {mode: 'no-cors'}).catch(String)", other)
            == "TypeError: Failed to fetch"
        )
    assert tab.evaluate("window.ran === undefined")
