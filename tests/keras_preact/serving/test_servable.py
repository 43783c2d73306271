"""A loaded version answers as its SavedModel does, and says what is wrong with
everything else.
"""

import asyncio
import gc
import io
import json
import os
import re
import shutil
import struct
import threading
import weakref
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from keras_preact.export import _images
from keras_preact.serving import loading
from keras_preact.serving.errors import DeadlineExceeded, RequestError, TooBusy, TooLarge
from keras_preact.serving.loading import LoadError
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.servable import INLINE_BYTES, DirectDecoder, ImageDecoder
from keras_preact.serving.settings import Settings
from tests.keras_preact.serving import small_model

GENEROUS = 60


def load(version, settings, metrics=None):
    return loading.load(version, settings, metrics or Metrics(int, list))


@pytest.fixture(scope="module")
def reference():
    return small_model.module()


@pytest.fixture(scope="module")
def servable(version):
    servable = load(version, Settings(version.parent.parent))
    yield servable
    asyncio.run(servable.close())


def predict(servable, signature, **inputs):
    checked = servable.signatures[signature].check(
        {name: np.asarray(value) for name, value in inputs.items()}
    )
    return asyncio.run(asyncio.wait_for(servable.predict(signature, checked, None), GENEROUS))


def files_of(files) -> np.ndarray:
    return np.array(files, object)


def images_of(number: int, seed: int = 0) -> tuple[np.ndarray, list[bytes]]:
    pixels = small_model.pixels(number, seed)
    return pixels, [small_model.png(image) for image in pixels]


def test_it_knows_what_it_is(servable, version):
    assert (servable.name, servable.version, servable.classes) == (
        "insects",
        7,
        small_model.CLASSES,
    )
    assert sorted(servable.signatures) == ["features", "predict_bytes", "serving_default"]
    [images] = servable.signatures["serving_default"].inputs.values()
    assert (images.name, images.dtype, images.shape) == (
        "images",
        "float32",
        (None, *small_model.SHAPE),
    )
    assert images.expected.bounds == (0, 255)
    assert servable.waiting == 0
    definition = servable.signature_defs["predict_bytes"]
    assert definition["method_name"] == "tensorflow/serving/predict"
    assert definition["inputs"]["image_bytes"]["dtype"] == "DT_STRING"
    assert definition["outputs"]["scores"]["tensor_shape"]["dim"][1]["size"] == str(
        small_model.TOP_K
    )
    assert str(version.parent.parent) not in json.dumps(servable.signature_defs)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", ">f4"])
def test_numbers_of_every_type(dtype, servable, reference):
    images = small_model.pixels(3)
    wanted = reference.core(images)
    answer = predict(servable, "serving_default", images=images.astype(dtype))
    assert sorted(answer) == ["logits", "probabilities"]
    for name, values in answer.items():
        np.testing.assert_allclose(values, wanted[name], rtol=1e-5, atol=1e-5)
    features = predict(servable, "features", images=images.astype(dtype))
    assert sorted(features) == ["features"]
    np.testing.assert_allclose(features["features"], wanted["features"], rtol=1e-5)


def test_files_of_images_are_answered_as_the_saved_model_does(servable, reference):
    _, files = images_of(4)
    wanted = {
        name: value.numpy()
        for name, value in reference.predict_bytes(np.array(files, object)).items()
    }
    # two classes have equal scores; the first must come first
    assert any({1, 3} <= set(row) for row in wanted["indices"].tolist())
    answer = predict(servable, "predict_bytes", image_bytes=np.array(files, object))
    assert sorted(answer) == sorted(wanted)
    assert answer["indices"].dtype == np.int32
    np.testing.assert_array_equal(answer["indices"], wanted["indices"])
    np.testing.assert_allclose(answer["scores"], wanted["scores"], rtol=1e-5)
    assert answer["classes"].tolist() == [
        [name.decode() for name in row] for row in wanted["classes"].tolist()
    ]


GOOD = np.zeros((2, 8, 8, 3), "float32")


def spoiled(value) -> np.ndarray:
    images = GOOD.astype("float64")
    images[1, 2, 3, 0] = value
    return images


BYTES = "predict_bytes"


@pytest.mark.parametrize(
    ("signature", "inputs", "message"),
    [
        ("features", {}, "features takes images. Received: nothing"),
        ("features", {"pixels": GOOD}, "features takes images. Received: pixels"),
        ("features", {"images": GOOD, "more": GOOD}, "takes images. Received: images, more"),
        ("features", {"images": GOOD > 0}, "`images` must hold float32. Received: bool"),
        ("features", {"images": GOOD.astype("complex64")}, "must hold float32. Received: complex"),
        ("features", {"images": np.array(["a"])}, "must hold float32. Received: str"),
        ("features", {"images": np.array([b"a", None])}, "must hold float32. Received: texts"),
        ("features", {"images": GOOD[0]}, "shape (any, 8, 8, 3), with at least one example. Rec"),
        ("features", {"images": GOOD[:, 1:]}, "Received: (2, 7, 8, 3)"),
        ("features", {"images": np.float32(3)}, "Received: ()"),
        ("features", {"images": GOOD[:0]}, "at least one example. Received: (0, 8, 8, 3)"),
        ("features", {"images": spoiled(np.nan)}, "another one in example 1"),
        ("features", {"images": spoiled(-np.inf)}, "another one in example 1"),
        ("features", {"images": spoiled(1e300)}, "another one in example 1"),
        (BYTES, {"images": GOOD}, "predict_bytes takes image_bytes. Received: images"),
        (BYTES, {"image_bytes": np.empty(0, object)}, "at least one example"),
        (BYTES, {"image_bytes": GOOD}, "`image_bytes` must hold string. Received: float32"),
        (BYTES, {"image_bytes": np.array([[b"a"]], object)}, "shape (any), with at least"),
        (BYTES, {"image_bytes": np.array([b""], object)}, "image 0 is damaged or cut off"),
    ],
)
def test_what_cannot_be_answered(signature, inputs, message, servable):
    with pytest.raises(RequestError) as caught:
        predict(servable, signature, **inputs)
    assert caught.value.status == 400
    assert message in caught.value.message


@pytest.mark.parametrize("signature", ["serving_default", "predict_bytes"])
def test_more_than_a_batch(signature, servable):
    pixels, files = images_of(5)
    inputs = {"image_bytes": files_of(files)} if signature == BYTES else {"images": pixels}
    with pytest.raises(TooLarge, match=r"at most 4 .* Received: 5"):
        predict(servable, signature, **inputs)


@pytest.mark.anyio
async def test_a_damaged_image_is_named_and_spoils_nobodys_batch(version, reference):
    """Bad and good requests wait for each other to fill one batch."""
    pixels, files = images_of(6)
    wanted = reference.core(pixels)["probabilities"].numpy().max(axis=1)
    requests = [
        [files[0]],
        [files[1], files[2][:60], files[3]],
        [files[4], small_model.png(np.zeros((9, 7, 3)))],
        [b"no image at all", files[5][:-9]],
        [files[5]],
    ]
    servable = await asyncio.to_thread(load, version, Settings(version, batch_wait_ms=50))
    tasks = [
        servable.predict("predict_bytes", {"image_bytes": files_of(request)}, None)
        for request in requests
    ]
    try:
        async with asyncio.timeout(GENEROUS):
            first, *bad, last = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await servable.close()
    np.testing.assert_allclose(first["scores"][:, 0], wanted[:1], rtol=1e-5)
    np.testing.assert_allclose(last["scores"][:, 0], wanted[5:], rtol=1e-5)
    assert all(isinstance(error, RequestError) for error in bad)
    assert [error.message for error in bad] == [
        "image 1 is damaged or cut off",
        "image 1 is 7 x 9 pixels",
        "image 0 is damaged or cut off",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("tensorflow", {}),
        ("tensorflow", {"batching": False}),
        ("openvino", {"batch_wait_ms": 2.0}),
        pytest.param("tensorflow", {"batch_wait_ms": 2.0}, marks=pytest.mark.soak),
        pytest.param("openvino", {}, marks=pytest.mark.soak),
        pytest.param("openvino", {"batching": False}, marks=pytest.mark.soak),
    ],
)
async def test_many_clients_at_once_each_get_their_own_answer(engine, options, version, reference):
    pytest.importorskip(engine)
    pixels, files = images_of(60)
    wanted = reference.core(pixels)["logits"].numpy()
    best = np.argsort(-wanted, axis=1, kind="stable")[:, :1]
    metrics = Metrics(int, list)

    def batches():
        """Return how many batches were computed, and how many images."""
        labels = {"model": "insects", "version": "7"}
        return [
            metrics.registry.get_sample_value(f"keras_preact_batch_rows_{name}", labels)
            for name in ("count", "sum")
        ]

    async def client(start):
        own = slice(start, start + 1 + start % 4)
        if start % 2:
            answer = await servable.predict("serving_default", {"images": pixels[own]}, None)
            np.testing.assert_allclose(answer["logits"], wanted[own], rtol=1e-4, atol=1e-4)
        else:
            images = {"image_bytes": files_of(files[own])}
            answer = await servable.predict("predict_bytes", images, None)
            np.testing.assert_array_equal(answer["indices"][:, :1], best[own])

    settings = Settings(version, engine=engine, max_queue=500, **options)
    servable = await asyncio.to_thread(load, version, settings, metrics)
    assert batches() == [4, 1 + 2 + 4 + 1]  # the warm-up
    try:
        async with asyncio.timeout(GENEROUS):
            await asyncio.gather(*map(client, range(56)))
    finally:
        await servable.close()
    count, rows = batches()
    assert rows - 8 == sum(1 + start % 4 for start in range(56))
    assert (rows - 8) / 4 <= count - 4 <= 56
    if options == {"batching": False}:
        assert count - 4 == 56


@pytest.mark.anyio
async def test_images_that_wait_to_be_decoded_are_bounded_and_late_ones_are_dropped(reference):
    _, files = images_of(4)
    entered, release = threading.Semaphore(0), threading.Event()

    def slow_decode(file):
        entered.release()
        assert release.wait(GENEROUS)
        return reference.decode(file)

    def request(number, seconds=None):
        deadline = seconds and asyncio.get_running_loop().time() + seconds
        return asyncio.ensure_future(decoder(files[:number], deadline))

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
        np.testing.assert_array_equal(await first, small_model.pixels(4)[:3])
    finally:
        release.set()
        decoder.close()
    assert decoder.pending == 0


def test_closing_leaves_no_thread_and_no_memory(version):
    before = threading.active_count()
    servable = load(version, Settings(version, batching=False))
    predict(servable, "predict_bytes", image_bytes=files_of(images_of(2)[1]))
    asyncio.run(servable.close())
    assert threading.active_count() == before
    closed = weakref.ref(servable)
    del servable
    gc.collect()
    assert closed() is None


def copied(version, tmp_path):
    return shutil.copytree(version, tmp_path / "models" / "insects" / "7")


def refusal(version, **options) -> str:
    before = threading.active_count()
    with pytest.raises(LoadError) as caught:
        load(version, Settings(version.parent.parent, **options))
    assert str(version.parent.parent) not in str(caught.value)
    assert threading.active_count() == before
    return str(caught.value)


FILES = [
    "saved_model.pb",
    "variables/variables.index",
    "variables/variables.data-00000-of-00001",
    "fingerprint.pb",
]


@pytest.mark.parametrize("name", [*FILES, "assets.extra/tf_serving_warmup_requests"])
def test_a_flipped_bit_is_found(name, version, tmp_path):
    file = copied(version, tmp_path) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert (
        refusal(file.parents[name.count("/")])
        == f"Its {name} is damaged: the SHA-256 hash is not the one in the model card."
    )


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(name, version, tmp_path):
    damaged = copied(version, tmp_path)
    (damaged / name).unlink()
    assert f"Its {name} cannot be read (No such file" in refusal(damaged)


def test_a_file_that_the_card_does_not_know_is_found(version, tmp_path):
    damaged = copied(version, tmp_path)
    (damaged / ".nfs0001").write_text("hidden")
    asyncio.run(load(damaged, Settings(tmp_path)).close())
    (damaged / "assets" / "words.txt").parent.mkdir(exist_ok=True)
    (damaged / "assets" / "words.txt").write_text("more")
    assert "assets/words.txt, which its model card does not know" in refusal(damaged)


@pytest.mark.parametrize(
    "name", ["../../../../../../../etc/passwd", "/dev/zero", "variables/../../outside"]
)
def test_a_card_that_leads_out_of_the_folder_is_refused(name, version, tmp_path):
    damaged = copied(version, tmp_path)
    (damaged.parent / "outside").write_text("secret")
    card = damaged / "assets.extra" / "model_card.json"
    whole = json.loads(card.read_text())
    card.write_text(json.dumps(whole | {"files": whole["files"] | {name: "0" * 64}}))
    assert refusal(damaged) == "Its model card lists a file outside of its folder."


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "name", ["saved_model.pb", "assets/more", "assets.extra/model_card.json", "variables"]
)
def test_what_can_be_read_without_end_is_refused(name, kind, version, tmp_path):
    damaged = copied(version, tmp_path)
    path = damaged / name
    if path.is_dir():
        path.rename(tmp_path / "away")
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert refusal(damaged) == f"Its {name} is not a regular file."


def test_cards_that_do_not_serve(version, tmp_path):
    damaged = copied(version, tmp_path)
    card = damaged / "assets.extra" / "model_card.json"
    whole = json.loads(card.read_text())
    for text, message in [
        (card.read_text()[:-5], "Invalid JSON"),
        ("[]", "should be an object"),
        (
            json.dumps({key: value for key, value in whole.items() if key != "files"}),
            "files: Field",
        ),
        (json.dumps(whole | {"signatures": {"features": {"inputs": {}}}}), "features.outputs: "),
        (json.dumps(whole | {"top_k": "some"}), "top_k: "),
    ]:
        card.write_text(text)
        assert re.search(f"model_card.json cannot be read: .*{message}", refusal(damaged))
    card.unlink()
    assert "It has no assets.extra/model_card.json" in refusal(damaged)


def test_saved_models_of_another_kind(tmp_path):
    import tensorflow as tf

    other = small_model.write(tmp_path / "models" / "insects" / "1")
    card = json.loads((other / "assets.extra" / "model_card.json").read_text())

    def replace(write):
        shutil.rmtree(other)
        (other / "assets.extra").mkdir(parents=True)
        write()
        (other / "assets.extra" / "model_card.json").write_text(
            json.dumps(card | {"files": small_model.hashes(other)})
        )

    replace(lambda: tf.saved_model.save(tf.Module(), str(other)))
    assert "no function `core`" in refusal(other)
    replace(lambda: (other / "saved_model.pb").write_bytes(b"anything"))
    assert "cannot load its SavedModel" in refusal(other)


def test_a_version_whose_warm_up_fails_is_not_served(tmp_path):
    signatures = small_model.signatures()
    signatures["serving_default"]["inputs"]["images"]["shape"] = [None, 9, 9, 3]
    version = small_model.write(tmp_path / "models" / "insects" / "1", signatures=signatures)
    assert "A warm-up request of it fails: `images` must have the shape (any, 9, 9, 3)" in refusal(
        version
    )


def test_without_warm_up_and_with_smaller_batches_than_it_was_exported_for(version, tmp_path):
    servable = load(version, Settings(tmp_path, max_batch_size=2))
    with pytest.raises(TooLarge, match="at most 2"):
        predict(servable, "features", images=small_model.pixels(3))
    asyncio.run(servable.close())
    servable = load(
        small_model.write(tmp_path / "models" / "insects" / "1", warmup=False), Settings(tmp_path)
    )
    assert predict(servable, "features", images=GOOD)["features"].shape == (2, 6)
    asyncio.run(servable.close())


def interlaced() -> bytes:
    """Return a PNG of 8 x 8 grey pixels in the seven passes of Adam7, which Pillow does
    not write.
    """
    image = np.arange(64, dtype="uint8").reshape(8, 8) * 4
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2)]
    passes.append((1, 0, 2, 1))
    data = b"".join(
        b"\0" + row.tobytes() for y, x, down, right in passes for row in image[y::down, x::right]
    )

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 1)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


def image_files() -> dict[str, bytes]:
    """Return files of 8 x 8 pixels, of every kind that clients have."""
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 256, (8, 8, 4), dtype="uint8"), "RGBA")
    deep = Image.fromarray(rng.integers(0, 2**16, (8, 8), dtype="uint16"))
    palette = colours.convert("RGB").quantize(7)

    def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    return {
        **{f"PNG {mode}": saved(colours.convert(mode)) for mode in ("1", "L", "LA", "RGB", "RGBA")},
        "PNG of a palette": saved(palette),
        "PNG of a palette with transparency": saved(palette, transparency=bytes([0, 90, 255])),
        "PNG of grey with a transparent value": saved(colours.convert("L"), transparency=7),
        "PNG of 16 bits": saved(deep),
        "interlaced PNG": interlaced(),
        **{
            f"JPEG {mode}": saved(colours.convert(mode), "JPEG", quality=80)
            for mode in ("L", "RGB", "CMYK")
        },
        "progressive JPEG": saved(colours.convert("RGB"), "JPEG", progressive=True),
        "JPEG with all colours": saved(colours.convert("RGB"), "JPEG", subsampling=0),
    }


@pytest.mark.parametrize("channels", [1, 3])
def test_the_direct_decoder_does_what_an_exported_graph_does(channels):
    exported = _images.Decoder((8, 8), channels)
    direct = DirectDecoder(8, 8, channels)
    left = []
    for name, file in image_files().items():
        found = direct(file)
        if found is None:
            left.append(name)
        else:
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found[np.newaxis], exported([file]), err_msg=name)
    assert left == (["JPEG CMYK"] if channels == 1 else [])


def test_the_direct_decoder_leaves_the_rest_to_the_graph():
    direct, files = DirectDecoder(8, 8, 3), image_files()
    whole, jpeg = files["PNG RGB"], files["JPEG RGB"]
    assert direct(whole, max_pixels=64) is not None
    assert direct(whole, max_pixels=63) is None
    assert [DirectDecoder(*size, 3)(one) for size in [(8, 9), (9, 8)] for one in (whole, jpeg)] == (
        [None] * 4
    )
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "a" * 1000, zip=True)
    file = io.BytesIO()
    Image.open(io.BytesIO(whole)).save(file, "PNG", pnginfo=text)
    many_scans = jpeg[:-2] + b"\xff\xda\0\x08\1" * 51 + jpeg[-2:]
    rest = [
        file.getvalue(),
        many_scans,
        whole[:20],
        whole[:-20],
        jpeg[:20],
        jpeg[:-20],
        b"",
        b"GIF89a",
    ]
    assert [direct(one) for one in rest] == [None] * len(rest)


@pytest.mark.parametrize("number", [2, 40])
def test_files_of_the_networks_size_are_decoded_without_the_graph(number, tmp_path):
    """Few of them in the event loop, many in threads."""
    preprocessing = {"mean": [0], "std": [255], "size": 8, "crop": None}
    for crop, direct in [(None, True), ("center", False)]:
        path = small_model.write(
            tmp_path / f"{crop}" / "insects" / "1",
            max_image_pixels=64,
            preprocessing=preprocessing | {"crop": crop},
        )
        calls = []
        loaded = loading.read_card(path).direct_decoder
        assert (loaded == DirectDecoder(*small_model.SHAPE)) is direct
        pixels, files = images_of(number)
        decoder = ImageDecoder(calls.append, 100, direct=loaded)
        if loaded is not None:
            np.testing.assert_array_equal(asyncio.run(decoder(files, None)), pixels)
            assert (sum(map(len, files)) <= INLINE_BYTES) is (number == 2)
            assert not calls
        decoder.close()


def test_what_a_load_leaves_in_cycles_goes_at_its_end():
    class Node:
        pass

    with loading._collected_at_the_end():
        assert not gc.isenabled()
        node = Node()
        node.itself = node
        alive = weakref.ref(node)
        del node
        assert alive() is not None
    assert alive() is None
    assert gc.isenabled()
