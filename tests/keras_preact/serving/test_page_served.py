"""The page in a real browser, served by the whole server with exported models: it shows
what their SavedModels answer.
"""

import urllib.request

import keras
import numpy as np
import pytest
from playwright import sync_api

import keras_preact as kp
from keras_preact.serving.app import create_app
from keras_preact.serving.settings import Settings
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

CLASSES = [EVIL, *(f"class {i}" for i in range(9))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    keras.utils.set_random_seed(0)
    directory = tmp_path_factory.mktemp("models")
    images = kp.create_model("cifar_resnet20_preact", include_preprocessing=True, width_factor=0.25)
    kp.export.save(images, directory / "pictures", classes=CLASSES, version=7, batch_sizes=[1, 2])
    numbers = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
    )
    kp.export.save(numbers, directory / "numbers", classes=["a", "b", "c"], batch_sizes=[1])
    return directory


def answers(directory, files):
    import tensorflow as tf

    outputs = tf.saved_model.load(str(directory / "pictures" / "7")).signatures["predict_bytes"](
        image_bytes=tf.constant(files)
    )
    return [
        [(name.decode(), float(score)) for name, score in zip(names, scores, strict=True)]
        for names, scores in zip(outputs["classes"].numpy(), outputs["scores"].numpy(), strict=True)
    ]


@needs_browser
def test_shows_what_the_model_answers(directory):
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
            "version 7 \xb7 10 classes \xb7 sees 32\xa0\xd7\xa032 pixels"
        )
        drop(
            tab,
            *((f"{EVIL}{i}.png", file) for i, file in enumerate(files)),
            ("report.pdf", b"%PDF-1.4"),
            ("long.bin", bytes(600_000)),
        )

        cards = tab.locator(".card").all()
        for card, answer in zip(cards[:3], answers(directory, files), strict=True):
            shown = rows(card)
            assert [name for name, *_ in shown] == [name for name, _ in answer]
            assert [score for _, score, _ in shown] == [percent(score) for _, score in answer]
            np.testing.assert_allclose(
                [bar for *_, bar in shown], [score for _, score in answer], atol=0.01
            )
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
    (tmp_path / "numbers").symlink_to(directory / "numbers")
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
