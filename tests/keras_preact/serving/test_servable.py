"""A loaded version answers as its SavedModel does, and says what is wrong with
everything else.
"""

import asyncio
import gc
import json
import shutil
import struct
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import _check
from keras_preact.export.version import VersionError
from keras_preact.serving import loading
from keras_preact.serving.batching import ComputationError
from keras_preact.serving.errors import RequestError, TooBusy, TooLarge
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.settings import Settings
from tests.keras_preact.export import image_files
from tests.keras_preact.export.one_process import in_this_process
from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import CLASSES, NAME, encoded, random_images

GENEROUS = 60
FILES = [encoded(seed, size=(32, 32)) for seed in range(4)]
PIXELS = np.stack([image_files.noise(32, 32, seed=seed) for seed in range(4)]).astype("float32")
BYTES = "predict_bytes"


def load(version, **options):
    return loading.load(version, Settings(version.parent.parent, **options), Metrics())


@pytest.fixture(scope="module")
def servable(version):
    servable = load(version)
    yield servable
    asyncio.run(servable.close())


def predict(servable, signature, value):
    return asyncio.run(asyncio.wait_for(servable.predict(signature, value), GENEROUS))


def test_batches_of_the_warm_up_are_not_counted(version):
    metrics = Metrics()
    servable = loading.load(version, Settings(version.parent.parent), metrics)

    def counted(name):
        labels = {"model": version.parent.name, "version": version.name}
        return metrics.registry.get_sample_value(f"keras_preact_batch_{name}", labels)

    try:
        assert counted("rows_sum") == counted("seconds_count") == 0
        predict(servable, "serving_default", random_images(0, 3).astype("float32"))
        assert (counted("rows_sum"), counted("seconds_count")) == (3, 1)
    finally:
        asyncio.run(servable.close())


def files_of(*files) -> np.ndarray:
    return np.array(files, object)


def test_the_answers_are_the_saved_models(servable, saved_model):
    images = random_images(0, 3).astype("float32")
    wanted = saved_model.loaded.core(images)
    outputs = {"serving_default": ["logits", "probabilities"], "features": ["features"]}
    for signature, names in outputs.items():
        answer = predict(servable, signature, images)
        assert sorted(answer) == names
        for name in names:
            np.testing.assert_allclose(answer[name], wanted[name], rtol=1e-4, atol=1e-4)
    files = [*FILES[:2], encoded(2), encoded(3, "JPEG")]  # the last two are of another size
    answer = predict(servable, BYTES, files_of(*files))
    probabilities = saved_model.probabilities(saved_model.loaded.decode(files).numpy())
    best = -np.sort(-probabilities, axis=1)[:, :5]
    np.testing.assert_allclose(answer["scores"], best, rtol=1e-4)
    found = np.take_along_axis(probabilities, answer["indices"], 1)
    np.testing.assert_allclose(found, best, rtol=1e-4)
    assert answer["indices"].dtype == np.int32
    assert (answer["classes"] == np.array(CLASSES, object)[answer["indices"]]).all()


JPEG, PNG = encoded(1, "JPEG"), encoded(1)
SIDE = 50_000  # such an image is 7.5 GB
FRAME = JPEG.index(b"\xff\xc0") + 5
NO_IMAGES = {
    "no bytes": b"",
    "junk": np.random.default_rng(0).bytes(5000),
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "truncated png": PNG[:-9],
    "another format": encoded(1, "GIF"),
    "png signature alone": PNG[:8],
    "damaged png": PNG[:1000] + bytes([PNG[1000] ^ 0xFF]) + PNG[1001:],
    "no pixels": image_files.png(0, 5, 8, 2, bytes(1000)),
    "another size than its data": image_files.png(3000, 3000, 8, 2, bytes(1000)),
    "huge png": image_files.png(SIDE, SIDE, 1, 0, bytes(1 + SIDE // 8) * 1000),
    "huge jpeg": JPEG[:FRAME] + struct.pack(">HH", SIDE, SIDE) + JPEG[FRAME + 4 :],
}

DAMAGED = {"truncated jpeg", "truncated png", "damaged png", "another size than its data"}


@pytest.mark.parametrize("kind", NO_IMAGES)
def test_a_file_that_is_no_image_is_named_and_spoils_nobodys_batch(kind, servable, saved_model):
    first, second, third, last = FILES
    requests = [[first], [second, NO_IMAGES[kind], third], [last]]

    async def ask():
        answers = (servable.predict(BYTES, files_of(*files)) for files in requests)
        return await asyncio.gather(*answers, return_exceptions=True)

    good, error, other = asyncio.run(asyncio.wait_for(ask(), GENEROUS))
    scores = [answer["scores"][0, 0] for answer in (good, other)]
    wanted = saved_model.probabilities(PIXELS).max(axis=1)
    np.testing.assert_allclose(scores, wanted[[0, 3]], rtol=1e-4)
    assert type(error) is RequestError
    assert "image 1" in error.message
    assert (f"{SIDE} x {SIDE} pixels" in error.message) == ("huge" in kind)
    cut_off = error.message.endswith("is damaged or cut off. Send a whole PNG, JPEG or WebP file.")
    assert cut_off == (kind in DAMAGED)
    for word in ("Traceback", "tensorflow", "node ", "{{", 'File "', "/tmp"):
        assert word not in error.message


@pytest.mark.anyio
async def test_an_input_that_the_network_refuses_spoils_nobodys_batch():
    """Such as a token outside the vocabulary: its client alone gets an error, with status
    400. Any other failure is the server's.
    """
    servable = fakes.load(Path("toy/7"), Settings("models"))
    images = [np.full((1, *fakes.SHAPE), value, "float32") for value in (1, 667, 2, 666)]
    free = servable.batcher._run.free
    free.clear()
    tasks = [asyncio.create_task(servable.predict("features", image)) for image in images]
    await asyncio.sleep(0)
    free.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), GENEROUS)
    assert [result["features"][0, 0] for result in (results[0], results[2])] == [1, 2]
    assert (type(results[1]), results[1].status) == (RequestError, 400)
    assert "cannot compute this input of the shape (1, 2, 2, 1)" in results[1].message
    assert type(results[3]) is ComputationError
    await servable.close()


def test_the_vocabulary_is_in_the_card(tmp_path, monkeypatch):
    """The smallest one that reads the tokens, also in a nested model."""
    monkeypatch.setattr(_check, "replay", in_this_process)
    tokens = keras.Input((6,))
    large, small = keras.layers.Embedding(30, 4), keras.Sequential([keras.layers.Embedding(20, 4)])
    pooled = keras.layers.GlobalAveragePooling1D()(large(tokens) + small(tokens))
    model = keras.Model(tokens, keras.layers.Dense(2)(pooled))
    servable = load(kp.export.save(model, tmp_path / "m", classes=["a", "b"]))
    spec = servable.signatures["features"].input
    assert (spec.dtype, spec.vocabulary, spec.expected) == ("int32", 20, None)
    answer = predict(servable, "features", spec.check(np.full((1, 6), 19)))
    assert answer["features"].shape == (1, 4)
    asyncio.run(servable.close())


def test_images_that_leave_no_pixel_are_refused(tmp_path, monkeypatch):
    """TensorFlow would end the process: a pooling leaves nothing for the last convolution."""
    monkeypatch.setattr(_check, "replay", in_this_process)
    layers = [
        keras.Input((None, None, 3)),
        keras.layers.Conv2D(4, 7, 2),
        keras.layers.MaxPooling2D(3, 2),
        keras.layers.Conv2D(4, 5),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(2),
    ]
    path = kp.export.save(keras.Sequential(layers), tmp_path / "m", classes=["a", "b"])
    servable = load(path)
    for name in ("serving_default", "features"):
        spec = servable.signatures[name].input
        asyncio.run(servable.predict(name, spec.check(np.zeros((1, 27, 27, 3), "float32"))))
        for sides in ((8, 8), (26, 27), (27, 1)):
            with pytest.raises(RequestError, match=r"at least the shape \(1, 27, 27, 3\)"):
                spec.check(np.zeros((1, *sides, 3), "float32"))
    asyncio.run(servable.close())


@pytest.mark.anyio
async def test_images_in_progress_are_bounded():
    servable = fakes.load(Path("toy/7"), Settings("models", max_queue=6))
    free = servable.batcher._run.free
    free.clear()
    images = np.ones((8, *fakes.SHAPE), "float32")

    async def ask(value):
        task = asyncio.create_task(servable.predict(BYTES if value is FILE else "features", value))
        await asyncio.sleep(0)
        return task

    FILE = files_of(b"1", b"2")
    try:
        tasks = [await ask(images[:3]), await ask(FILE)]
        with pytest.raises(
            TooBusy, match=r"5 examples are in progress .* at most 6 may be. Received: 2 more"
        ):
            await servable.predict("features", images[:2])
        tasks.append(await ask(images[:1]))  # there is room for one
        assert servable.in_progress == 6
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        tasks[0] = await ask(images[:3])  # its place is free at once
    finally:
        free.set()
    await asyncio.wait_for(asyncio.gather(*tasks), GENEROUS)
    assert servable.in_progress == 0
    assert len((await servable.predict("features", images))["features"]) == 8
    await servable.close()


CARD = "assets.extra/model_card.json"
WARM_UP = "assets.extra/tf_serving_warmup_requests"


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_card(version, change):
    card = json.loads((version / CARD).read_text())
    change(card)
    (version / CARD).write_text(json.dumps(card))


def of_another_size(card):
    card["signatures"]["serving_default"]["inputs"]["images"]["shape"] = [None, 9, 9, 3]


DAMAGE = [
    (lambda v: flip_a_bit(v / "saved_model.pb"), "Its saved_model.pb is damaged: the SHA-256"),
    (lambda v: (v / CARD).unlink(), f"It has no {CARD}"),
    *(
        (lambda v, change=change: change_card(v, lambda c: c.update(change)), message)
        for change, message in (
            ({"top_k": "some"}, "a positive whole number was expected"),
            ({"top_k": 0}, "a positive whole number was expected"),
            ({"batch_sizes": ["some"]}, "a positive whole number was expected"),
            ({"batch_sizes": [0]}, "a positive whole number was expected"),
            ({"classes": CLASSES[:-1]}, f"of its {len(CLASSES)} outputs under `classes`. Received"),
            ({"classes": [*CLASSES, "more"]}, f"Received: {len(CLASSES) + 1} values. Correct it"),
            ({"classes": [*CLASSES[:-1], CLASSES[0]]}, f"with {CLASSES[0]!r} more than once"),
            ({"classes": [*range(len(CLASSES))]}, f"Received: {len(CLASSES)} values. Correct it"),
            ({"classes": [*CLASSES[:-1], "\udcff"]}, f"Received: {len(CLASSES)} values."),
            ({"classes": "".join(CLASSES)}, "Received: str. Correct it"),
            ({"classes": None}, "Received: NoneType"),
        )
    ),
    (lambda v: change_card(v, of_another_size), "One of its warm-up requests fails: `images` must"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_version_that_cannot_be_served_says_why(damage, message, version, tmp_path):
    damaged = shutil.copytree(version, tmp_path / NAME / "7")
    damage(damaged)
    with pytest.raises(VersionError) as caught:
        load(damaged)
    assert message in caught.value.problem
    assert str(tmp_path) not in caught.value.problem


def test_a_version_without_warm_up_and_with_smaller_batches_leaves_no_memory(version, tmp_path):
    other = shutil.copytree(version, tmp_path / NAME / "7")
    (other / WARM_UP).unlink()
    (other / ".hidden").touch()  # hidden files do not count
    change_card(other, lambda card: card["files"].pop(WARM_UP))
    servable = load(other, max_batch_size=2)
    with pytest.raises(TooLarge, match="at most 2"):
        predict(servable, "features", PIXELS)
    assert predict(servable, "features", PIXELS[:2])["features"].shape == (2, 16)
    predict(servable, BYTES, files_of(*FILES[:2]))
    asyncio.run(servable.close())
    closed = weakref.ref(servable)
    del servable
    gc.collect()
    assert closed() is None
