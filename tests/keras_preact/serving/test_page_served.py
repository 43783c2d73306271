"""The page in a real browser, served by the whole app with an exported model: it shows
what the SavedModel answers.
"""

import urllib.request

import numpy as np
from playwright import sync_api

from keras_preact.serving.app import create_app
from keras_preact.serving.settings import Settings
from tests.keras_preact.serving import small_model
from tests.keras_preact.serving.page_api import (
    EVIL,
    chromium,
    drop,
    needs_browser,
    opened,
    percent,
    png,
    rows,
    serving,
    watched,
)
from tests.keras_preact.serving.server_process import wait_for


@needs_browser
def test_shows_what_the_model_answers(directory, saved_model):
    files = [png(size) for size in (32, 50, 300)]
    settings = Settings(directory, token="a-token", max_body_bytes=500_000)
    with (
        serving(create_app(settings)) as address,
        chromium() as browser,
        watched(browser, address) as tab,
    ):
        tab.goto(address)
        field = tab.get_by_label("The server asks for a token")
        field.fill("another")
        field.press("Enter")
        sync_api.expect(tab.locator("#notice")).to_have_text(
            "The server did not accept this token."
        )
        field.fill("a-token")
        field.press("Enter")
        sync_api.expect(tab.locator("#about")).to_have_text(
            "version 1 \xb7 10 classes \xb7 sees 32\xa0\xd7\xa032 pixels"
        )
        drop(
            tab,
            *((f"{EVIL}{i}.png", file) for i, file in enumerate(files)),
            ("report.pdf", b"%PDF-1.4"),
            ("long.bin", bytes(600_000)),
        )

        cards = tab.locator(".card").all()
        for card, file in zip(cards[:3], files, strict=True):
            names, scores = saved_model.classes(file)
            shown = rows(card)
            assert [name for name, *_ in shown] == names
            assert [score for _, score, _ in shown] == list(map(percent, scores))
            np.testing.assert_allclose([bar for *_, bar in shown], scores, atol=0.01)
        for card, text in zip(
            cards[3:],
            [
                "This file could not be read as an image.",
                "This file is larger than the server takes.",
            ],
            strict=True,
        ):
            sync_api.expect(card.locator(".what")).to_have_text(text)


@needs_browser
def test_says_when_there_is_nothing_for_images(directory, tmp_path):
    signatures = small_model.signatures()
    del signatures["predict_bytes"]
    small_model.write(tmp_path / "numbers" / "1", warmup=False, signatures=signatures)
    with (
        serving(create_app(Settings(tmp_path))) as address,
        chromium() as browser,
        watched(browser, address) as tab,
    ):
        tab.goto(address)
        sync_api.expect(tab.locator("#notice")).to_have_text(
            "The model here, numbers, does not take images."
        )
        (tmp_path / "pictures").symlink_to(directory / "pictures")
        wait_for(
            lambda: b'"takes_images":true' in urllib.request.urlopen(f"{address}v1/models").read()
        )
        opened(tab, address)
        drop(tab, ("cat.png", png()))
        rows(tab.locator(".card"))
