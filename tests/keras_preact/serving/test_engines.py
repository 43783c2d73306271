"""The engines compute what the SavedModel does."""

import gc
import sys
import threading
import weakref
from typing import get_args, get_type_hints

import numpy as np
import pytest

import keras_preact as kp
from keras_preact.serving import engines
from keras_preact.serving.settings import Settings
from tests.keras_preact.serving import small_model

#: Largest difference from TensorFlow in float32, times the largest value. bfloat16 has 8 bits: 4
#: roundings of each sum.
TOLERANCE = {"float32": 1e-5, "bfloat16": 4 * 2.0**-8}


@pytest.fixture(scope="module")
def model():
    return small_model.module()


@pytest.fixture(scope="module")
def loaded(model, tmp_path_factory):
    import tensorflow as tf

    path = tmp_path_factory.mktemp("model")
    tf.saved_model.save(model, str(path))
    return tf.saved_model.load(str(path))


def test_every_engine_is_a_choice_of_the_settings():
    assert get_args(get_type_hints(Settings)["engine"]) == tuple(engines.ENGINES)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_the_outputs_are_the_models_for_every_batch_size(
    engine, precision, model, loaded, tmp_path
):
    pytest.importorskip(engine)
    run = engines.ENGINES[engine](engines.freeze(loaded.core), Settings(tmp_path), precision)
    for number in (1, 3, 1, 4, 2):
        images = small_model.pixels(number, seed=number)
        outputs = run(images)
        assert sorted(outputs) == ["features", "logits", "probabilities"]
        for name, wanted in model.core(images).items():
            assert outputs[name].dtype == np.float32
            assert outputs[name].shape == wanted.shape
            tolerance = TOLERANCE[precision] * max(1, np.abs(wanted).max())
            np.testing.assert_allclose(outputs[name], wanted, rtol=0, atol=tolerance)


#: Networks whose graphs differ: pools and projections, stacks of units, no images.
NETWORKS = {
    "imagenet": lambda: kp.models.resnet_imagenet(
        (1, 2), block="bottleneck", width_factor=0.25, input_shape=(32, 32, 3), classes=10
    ),
    "stacks": lambda: kp.models.resnet_cifar(
        20, stacked=True, width_factor=0.25, input_shape=(16, 16, 3)
    ),
    "vectors": lambda: kp.models.dense_resnet(6, input_shape=(20,), classes=10),
}


@pytest.mark.parametrize(
    ("network", "precision"),
    [
        ("imagenet", "float32"),
        ("imagenet", "bfloat16"),
        ("vectors", "float32"),
        pytest.param("vectors", "bfloat16", marks=pytest.mark.soak),
        pytest.param("stacks", "float32", marks=pytest.mark.soak),
        pytest.param("stacks", "bfloat16", marks=pytest.mark.soak),
    ],
)
def test_exported_networks(network, precision, tmp_path):
    """Every engine computes what the export of a network does, in both precisions."""
    import tensorflow as tf

    from keras_preact.export import _graph, _scores
    from tests.keras_preact.harness import randomize

    model = NETWORKS[network]()
    randomize(model)
    dtype = {"float32": "float32", "bfloat16": "mixed_bfloat16"}[precision]
    core = _scores.take_apart(kp.transfer.changed_copy(model, dtype=dtype)).core
    _graph.write(core, _graph.Plan("softmax", fold=True), tmp_path / "1")
    loaded = tf.saved_model.load(str(tmp_path / "1"))  # holds the variables
    frozen = engines.freeze(loaded.core)
    images = np.random.default_rng(0).normal(size=(3, *model.input_shape[1:])).astype("float32")
    wanted = model(images, training=False).numpy()
    # many roundings one after another, of which few have the same sign
    allowed = (1 if precision == "float32" else 4) * TOLERANCE[precision]
    for engine in engines.ENGINES:
        pytest.importorskip(engine)
        outputs = engines.ENGINES[engine](frozen, Settings(tmp_path), precision)(images)
        np.testing.assert_allclose(
            outputs["logits"], wanted, rtol=0, atol=allowed * max(1, np.abs(wanted).max())
        )


def test_openvino_does_not_round_to_fewer_bits_by_itself(model, loaded, tmp_path):
    """On a CPU that is faster in bfloat16 it would; there the two differ by a thousand
    times more than float32 rounds.
    """
    openvino = pytest.importorskip("openvino")
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU computes in float32 only")
    images = small_model.pixels(4)
    wanted = model.core(images)["logits"].numpy()
    differences = {
        precision: np.abs(
            engines.openvino(engines.freeze(loaded.core), Settings(tmp_path), precision)(images)[
                "logits"
            ]
            - wanted
        )
        for precision in TOLERANCE
    }
    assert differences["float32"].max() < 1e-4 < differences["bfloat16"].max()


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_answers_stay_as_they_are_while_other_threads_compute(engine, loaded, tmp_path):
    pytest.importorskip(engine)
    run = engines.ENGINES[engine](
        engines.freeze(loaded.core), Settings(tmp_path, threads=1), "float32"
    )
    batches = [small_model.pixels(number, seed=number) for number in (1, 2, 3, 4)]
    wanted = [run(batch)["logits"].copy() for batch in batches]
    answers: dict[int, list[np.ndarray]] = {}

    def work(i):
        answers[i] = [run(batches[i])["logits"] for _ in range(25)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, logits in enumerate(wanted):
        for answer in answers[i]:
            np.testing.assert_allclose(answer, logits, atol=1e-5)


def test_a_frozen_function_holds_no_variable(model, tmp_path):
    import tensorflow as tf

    tf.saved_model.save(model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    variables = [weakref.ref(variable) for variable in loaded.core.concrete_functions[0].variables]
    assert len(variables) == 2
    frozen = engines.freeze(loaded.core)
    del loaded
    gc.collect()
    assert [variable() for variable in variables] == [None, None]
    images = small_model.pixels(2)
    logits = engines.tensorflow(frozen, Settings(tmp_path), "float32")(images)["logits"]
    np.testing.assert_allclose(logits, model.core(images)["logits"], rtol=1e-5)


def test_without_openvino_the_error_says_how_to_install_it(loaded, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ImportError, match=r"pip install 'keras-preact\[openvino\]'"):
        engines.openvino(engines.freeze(loaded.core), Settings(tmp_path), "float32")


def test_threads_that_come_too_late_are_no_error(loaded, caplog):
    import tensorflow as tf

    tf.constant(1) + 1  # from here on TensorFlow's threads are fixed
    engines.use_threads(None)
    engines.use_threads(tf.config.threading.get_intra_op_parallelism_threads())
    assert caplog.messages == []
    engines.use_threads(77)
    assert "not 77" in caplog.text
