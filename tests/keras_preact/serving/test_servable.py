"""A loaded version answers as its SavedModel does, and says what is wrong with
everything else.
"""

import asyncio
import gc
import hashlib
import json
import os
import shutil
import threading
import weakref

import numpy as np
import pytest

from keras_preact.serving import loading
from keras_preact.serving.errors import DeadlineExceeded, RequestError, TooBusy, TooLarge
from keras_preact.serving.loading import LoadError
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.servable import ImageDecoder
from keras_preact.serving.settings import Settings
from tests.keras_preact.export.image_files import noise
from tests.keras_preact.serving.server_process import CLASSES, NAME, encoded, random_images

GENEROUS = 60
FILES = [encoded(seed, size=(32, 32)) for seed in range(4)]
PIXELS = np.stack([noise(32, 32, seed=seed) for seed in range(4)]).astype("float32")


def load(version, **options):
    return loading.load(version, Settings(version.parent.parent, **options), Metrics(dict))


@pytest.fixture(scope="module")
def servable(version):
    servable = load(version)
    yield servable
    asyncio.run(servable.close())


def predict(servable, signature, value):
    array = servable.signatures[signature].input.check(np.asarray(value))
    return asyncio.run(asyncio.wait_for(servable.predict(signature, array, None), GENEROUS))


def files_of(*files) -> np.ndarray:
    return np.array(files, object)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", ">f4"])
def test_numbers_of_every_type(dtype, servable, saved_model):
    images = random_images(0, 3)
    wanted = saved_model.loaded.core(images.astype("float32"))
    outputs = {"serving_default": ["logits", "probabilities"], "features": ["features"]}
    for signature, names in outputs.items():
        answer = predict(servable, signature, images.astype(dtype))
        assert sorted(answer) == names
        for name in names:
            np.testing.assert_allclose(answer[name], wanted[name], rtol=1e-4, atol=1e-4)


def test_files_of_images_are_answered_with_the_best_classes(servable, saved_model):
    files = [*FILES[:2], encoded(2), encoded(3, "JPEG")]  # the last two are of another size
    answer = predict(servable, "predict_bytes", files_of(*files))
    probabilities = saved_model.probabilities(saved_model.loaded.decode(files).numpy())
    best = -np.sort(-probabilities, axis=1)[:, :5]
    np.testing.assert_allclose(answer["scores"], best, rtol=1e-4)
    found = np.take_along_axis(probabilities, answer["indices"], 1)
    np.testing.assert_allclose(found, best, rtol=1e-4)
    assert answer["indices"].dtype == np.int32
    assert (answer["classes"] == np.array(CLASSES, object)[answer["indices"]]).all()


def spoiled(value) -> np.ndarray:
    images = np.zeros((2, 32, 32, 3))
    images[1, 2, 3, 0] = value
    return images


GOOD = spoiled(0).astype("float32")
BYTES = "predict_bytes"


@pytest.mark.parametrize(
    ("signature", "value", "message"),
    [
        ("features", GOOD > 0, "`images` must hold float32. Received: bool"),
        ("features", np.array([b"a", None]), "must hold float32. Received: texts"),
        ("features", GOOD[:, 1:], "Received: (2, 31, 32, 3)"),
        ("features", np.float32(3), "Received: ()"),
        ("features", GOOD[:0], "at least one example. Received: (0, 32, 32, 3)"),
        ("features", spoiled(np.nan), "another one in example 1"),
        ("features", spoiled(1e300), "another one in example 1"),
        ("features", np.concatenate([GOOD] * 5), "at most 8 examples. Received: 10"),
        (BYTES, GOOD, "`image_bytes` must hold string. Received: float32"),
        (BYTES, files_of(b""), "image 0 is"),
        (BYTES, files_of(*[b""] * 9), "at most 8 examples. Received: 9"),
    ],
)
def test_what_cannot_be_answered(signature, value, message, servable):
    with pytest.raises(RequestError) as caught:
        predict(servable, signature, value)
    assert caught.value.status == (413 if "at most" in message else 400)
    assert message in caught.value.message


@pytest.mark.anyio
async def test_a_damaged_image_is_named_and_spoils_nobodys_batch(version, saved_model):
    first, second, third, last = FILES
    requests = [[first], [second, third[:-9], first], [second[:60], first], [last]]
    servable = await asyncio.to_thread(load, version)
    try:
        async with asyncio.timeout(GENEROUS):
            good, *bad, other = await asyncio.gather(
                *(servable.predict(BYTES, files_of(*r), None) for r in requests),
                return_exceptions=True,
            )
    finally:
        await servable.close()
    wanted = saved_model.probabilities(PIXELS).max(axis=1)
    np.testing.assert_allclose(good["scores"][:, 0], wanted[:1], rtol=1e-4)
    np.testing.assert_allclose(other["scores"][:, 0], wanted[3:], rtol=1e-4)
    assert [type(error) for error in bad] == [RequestError] * 2
    assert [error.message for error in bad] == [
        "image 1 is damaged or cut off",
        "image 0 is damaged or cut off",
    ]


@pytest.mark.anyio
async def test_images_that_wait_to_be_decoded_are_bounded_and_late_ones_are_dropped(saved_model):
    entered, release = threading.Semaphore(0), threading.Event()

    def slow_decode(file):
        entered.release()
        assert release.wait(GENEROUS)
        return saved_model.loaded.decode(file)

    def request(number, seconds=None):
        deadline = seconds and asyncio.get_running_loop().time() + seconds
        return asyncio.ensure_future(decoder(FILES[:number], deadline))

    decoder = ImageDecoder(slow_decode, max_queue=4)
    try:
        first = request(3)
        assert await asyncio.to_thread(entered.acquire, timeout=GENEROUS)
        assert decoder.pending == 3
        with pytest.raises(TooBusy, match="3 images wait"):
            await request(2)
        with pytest.raises(DeadlineExceeded):
            await request(1, seconds=0.01)
        release.set()
        np.testing.assert_array_equal(await first, PIXELS[:3])
    finally:
        release.set()
        decoder.close()
    assert decoder.pending == 0


def test_a_closed_version_leaves_no_memory(version):
    servable = load(version, batching=False)
    predict(servable, BYTES, files_of(*FILES))
    asyncio.run(servable.close())
    closed = weakref.ref(servable)
    del servable
    gc.collect()
    assert closed() is None


CARD = "assets.extra/model_card.json"
WARM_UP = "assets.extra/tf_serving_warmup_requests"
WEIGHTS = "variables/variables.data-00000-of-00001"


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def change_card(version, change):
    card = json.loads((version / CARD).read_text())
    change(card)
    (version / CARD).write_text(json.dumps(card))


def other_model(version, write):
    """Write another SavedModel, with a card that fits its files."""
    shutil.rmtree(version / "variables")
    write()
    names = ["saved_model.pb", "fingerprint.pb", WARM_UP]
    names += [str(path.relative_to(version)) for path in version.glob("variables/*")]
    hashes = {name: hashlib.sha256((version / name).read_bytes()).hexdigest() for name in names}
    change_card(version, lambda card: card.update(files=hashes))


def without_core(version):
    import tensorflow as tf

    other_model(version, lambda: tf.saved_model.save(tf.Module(), str(version)))


def no_saved_model(version):
    other_model(version, lambda: (version / "saved_model.pb").write_bytes(b"anything"))


def of_another_size(card):
    card["signatures"]["serving_default"]["inputs"]["images"]["shape"] = [None, 9, 9, 3]


DAMAGE = [
    (lambda v: flip_a_bit(v / "saved_model.pb"), "Its saved_model.pb is damaged: the SHA-256"),
    (lambda v: flip_a_bit(v / WEIGHTS), f"Its {WEIGHTS} is damaged: the SHA-256 hash is not"),
    (lambda v: flip_a_bit(v / WARM_UP), f"Its {WARM_UP} is damaged: the SHA-256 hash is not"),
    (lambda v: (v / WEIGHTS).unlink(), f"Its {WEIGHTS} is missing"),
    (lambda v: (v / "more.txt").touch(), "more.txt, which its model card does not know"),
    (lambda v: change_card(v, lambda c: c["files"].update({"../x": "0"})), "outside of its folder"),
    (lambda v: change_card(v, lambda c: c["files"].update({"/x": "0"})), "outside of its folder"),
    (
        lambda v: endless(v / "saved_model.pb"),
        "Its saved_model.pb is missing, or not a regular file.",
    ),
    (lambda v: endless(v / CARD), f"It has no {CARD}"),
    (lambda v: os.mkfifo(v / "pipe"), "It holds pipe, which"),
    (lambda v: (v / CARD).unlink(), f"It has no {CARD}"),
    (lambda v: (v / CARD).write_text("{"), "cannot be read: JSONDecodeError"),
    (lambda v: change_card(v, lambda c: c.update(top_k="some")), "cannot be read: ValueError"),
    (without_core, "no function `core`"),
    (no_saved_model, "cannot load its SavedModel"),
    (lambda v: change_card(v, of_another_size), "A warm-up request of it fails: `images` must"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_version_that_cannot_be_served_says_why(damage, message, version, tmp_path):
    damaged = shutil.copytree(version, tmp_path / NAME / "7")
    damage(damaged)
    with pytest.raises(LoadError) as caught:
        load(damaged)
    assert message in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_without_warm_up_and_with_smaller_batches_than_it_was_exported_for(version, tmp_path):
    other = shutil.copytree(version, tmp_path / NAME / "7")
    (other / WARM_UP).unlink()
    (other / ".hidden").touch()  # hidden files do not count
    change_card(other, lambda card: card["files"].pop(WARM_UP))
    servable = load(other, max_batch_size=2)
    with pytest.raises(TooLarge, match="at most 2"):
        predict(servable, "features", np.concatenate([GOOD, GOOD]))
    assert predict(servable, "features", GOOD)["features"].shape == (2, 16)
    asyncio.run(servable.close())
