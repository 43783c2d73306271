"""The page in a real browser, served by the whole app with an exported model: it shows
what the SavedModel answers.
"""

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
    percent,
    png,
    rows,
    serving,
    watched,
)


@needs_browser
def test_shows_what_the_model_answers(directory, saved_model, tmp_path):
    """Also of a model that comes while the page is open, beside one that takes no images."""
    files = [png(size) for size in (32, 50, 300)]
    signatures = small_model.signatures()
    del signatures["predict_bytes"]
    small_model.write(tmp_path / "numbers" / "1", warmup=False, signatures=signatures)
    settings = Settings(tmp_path, token="a-token", max_body_bytes=500_000)
    with (
        serving(create_app(settings)) as address,
        chromium() as browser,
        watched(browser, address) as tab,
    ):
        tab.goto(address)
        notice, field = tab.locator("#notice"), tab.get_by_label("The server asks for a token")
        field.fill("another")
        field.press("Enter")
        sync_api.expect(notice).to_have_text("The server did not accept this token.")
        field.fill("a-token")
        field.press("Enter")
        sync_api.expect(notice).to_have_text("The model here, numbers, does not take images.")
        (tmp_path / "pictures").symlink_to(directory / "pictures")
        sync_api.expect(tab.locator("#about")).to_have_text(
            "version 1 \xb7 10 classes \xb7 sees 32\xa0\xd7\xa032 pixels"
        )
        drop(
            tab,
            *((f"{EVIL}{i}.png", file) for i, file in enumerate(files)),
            ("report.pdf", b"%PDF-1.4"),
            ("long.bin", bytes(600_000)),
        )

        *cards, no_image, too_large = tab.locator(".card").all()
        for card, file in zip(cards, files, strict=True):
            names, scores = saved_model.classes(file)
            shown = rows(card)
            assert [name for name, *_ in shown] == names
            assert [score for _, score, _ in shown] == list(map(percent, scores))
            np.testing.assert_allclose([bar for *_, bar in shown], scores, atol=0.01)
        for card, text in (
            (no_image, "This file could not be read as an image."),
            (too_large, "This file is larger than the server takes."),
        ):
            sync_api.expect(card.locator(".what")).to_have_text(text)
