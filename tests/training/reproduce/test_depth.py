"""Profiles before training: the numbers against a network that is run by hand, the
files, the command and its mistakes.
"""

import json
import os
import re

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from tests.training.commands import error_of, words
from training import cli, data
from training.config import Data
from training.reproduce import depth, profiles


def run(*arguments):
    cli.main("reproduce depth", depth.depth, words(*map(str, arguments)))


def signals(x_mean, x_std, gradient_norm, stages):
    """Return a Propagation of a network of so many units in each stage."""
    units = tuple(
        f"stage{s}_unit{u}" for s, count in enumerate(stages, 1) for u in range(1, count + 1)
    )
    names = "x_norm residual_norm residual_mean residual_std shortcut_norm cut dead"
    return kp.analysis.Propagation(
        units=units,
        **dict.fromkeys(words(names), np.zeros(len(units))),
        x_mean=np.array(x_mean),
        x_std=np.array(x_std),
        gradient_norm=np.array(gradient_norm),
        weight_gradients={},
        loss=2.0,
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The folder of what --smoke of the smallest two depths has measured, in this
    process.
    """
    output = tmp_path_factory.mktemp("smoke")
    options = "--layers 20 11 29 --networks original preact_scaled plain --batch 4 --output"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            depth,
            "measured_apart",
            lambda settings, limit: json.loads(json.dumps(profiles.measure(settings))),
        )
        run("--smoke", options, output)
    return output


def test_measured_as_by_hand():
    settings = profiles.settings_of("original", 20, batch=5, seed=3)
    record = profiles.measure(json.loads(json.dumps(settings)))
    keras.utils.set_random_seed(3)
    model = kp.models.resnet_cifar(
        20, block="bottleneck", arrangement="original", width_factor=0.25, input_shape=(8, 8, 1)
    )
    digits = data.load(Data("digits")).held
    x = (digits.images[:5] - np.mean(digits.images)) / np.std(digits.images)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        seen = []
        h = ops.cast(x, "float32")
        for layer in model.layers[1:]:
            if layer is model.units[0]:
                tape.watch(h)
                seen.append(h)
            h = layer(h, training=True)
            if layer in model.units:
                seen.append(h)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(digits.labels[:5], h))
    gradients = tape.gradient(loss, seen)
    rms = [float(np.sqrt(np.mean(np.square(each)))) for each in seen]
    norms = [float(np.linalg.norm(np.ravel(each))) for each in gradients]
    assert record["profile"]["unit"] == list(range(7))
    np.testing.assert_allclose(record["profile"]["activation_rms"], rms, rtol=2e-3)
    np.testing.assert_allclose(record["profile"]["gradient_norm"], norms, rtol=2e-2)
    np.testing.assert_allclose(record["loss"], float(loss), rtol=2e-3)
    assert [(stage["first"], stage["last"]) for stage in record["stages"]] == [
        (1, 2),
        (3, 4),
        (5, 6),
    ]
    np.testing.assert_allclose(record["stages"][1]["growth"], rms[4] / rms[3], rtol=4e-3)
    np.testing.assert_allclose(record["gradient_ratio"], norms[1] / norms[6], rtol=4e-2)


def test_networks_are_what_their_names_say():
    models = {}
    for name in profiles.NETWORKS:
        arguments = json.loads(json.dumps(profiles.settings_of(name, 29)["arguments"]))
        models[name] = kp.models.resnet_cifar(**arguments)
        assert len(models[name].units) == 9
    shortcuts = {
        name: model.units[1].options.shortcut.layer_class.reads_input
        for name, model in models.items()
    }
    assert shortcuts == {"preact": True, "preact_scaled": True, "original": True, "plain": False}
    arrangements = {name: model.get_config()["arrangement"] for name, model in models.items()}
    assert len({str(arrangements[name]) for name in ("preact", "preact_scaled")}) == 1
    assert len({str(arrangements[name]) for name in ("preact", "original")}) == 2
    kernels = {
        name: {w.path: w for w in model.units[4].weights if "conv_3" in w.path}
        for name, model in models.items()
    }
    last = {name: np.std(next(iter(found.values()))) for name, found in kernels.items()}
    # by the root of 9 units
    assert last["preact_scaled"] == pytest.approx(last["preact"] / 3, rel=0.2)


def test_long_profile_is_thinned_but_for_the_ends_of_stages():
    total = 3 * 1111
    steps = np.arange(total + 1.0)
    record = profiles.profile(signals(0 * steps + 3, 4 + steps, np.exp(-steps / total), [1111] * 3))
    kept = record["profile"]["unit"]
    assert kept[0] == 0
    assert {1, 1111, 1112, 2222, 2223, 3333} <= set(kept)
    assert kept == sorted(set(kept))
    assert len(kept) <= profiles.POINTS + 7
    assert max(np.diff(kept)) <= total / profiles.POINTS + 1
    np.testing.assert_allclose(
        record["profile"]["activation_rms"], np.hypot(3, 4 + np.array(kept)), rtol=1e-5
    )
    np.testing.assert_allclose(record["gradient_ratio"], np.exp(1 - 1 / total), rtol=1e-5)
    assert len(json.dumps(record)) < 100_000


def test_what_overflows_is_null():
    record = profiles.profile(signals([0, 0, 0], [1, 2, np.nan], [np.inf, np.inf, 1], [2]))
    assert record["growth"] is None
    assert record["gradient_ratio"] is None
    assert record["profile"]["activation_rms"] == [1, 2, None]
    assert record["profile"]["gradient_norm"] == [None, None, 1]
    json.dumps(record, allow_nan=False)


def test_smoke_writes_two_depths_of_two_networks(smoke):
    files = sorted(path.name for path in (smoke / "depth").iterdir())
    assert files == [
        "original-11.json",
        "original-20.json",
        "preact_scaled-11.json",
        "preact_scaled-20.json",
    ]
    record = json.loads((smoke / "depth" / "preact_scaled-20.json").read_text())
    assert record["settings"] == profiles.settings_of("preact_scaled", 20, batch=4)
    assert record["code"].keys() == {"commit", "modified"}
    assert record["data"] == {"name": "digits", "hash": data.load(Data("digits")).hash}
    assert record["device"]["backend"] == "tensorflow"
    assert record["device"]["versions"]["keras"] == keras.__version__
    assert 1e8 < record["cost"]["peak_resident_bytes"] < 1e11
    assert 0 < record["cost"]["build_seconds"] < record["cost"]["seconds"]
    assert all(
        np.isfinite(record["profile"][key]).all() for key in ("activation_rms", "gradient_norm")
    )


def test_what_is_there_is_kept(smoke, capsys):
    before = {path: path.read_bytes() for path in (smoke / "depth").iterdir()}
    run("--networks original --layers 11 20 --batch 4 --output", smoke)
    assert "original-11: kept" in capsys.readouterr().out
    options = "--networks original --layers 11 --batch 4 --seed 1 --output"
    message = error_of(capsys, run, options, smoke)
    assert "seed 0, not 1" in message
    assert "--again" in message
    assert {path: path.read_bytes() for path in (smoke / "depth").iterdir()} == before


@pytest.mark.soak
def test_failure_is_told_and_the_others_are_measured_again(smoke, tmp_path, capsys, monkeypatch):
    """In real processes."""
    known = json.loads((smoke / "depth" / "original-20.json").read_text())
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "original-20.json").write_text(json.dumps(known | {"loss": -1.0}))
    of = profiles.settings_of
    monkeypatch.setattr(
        depth,
        "settings_of",
        lambda name, layers, *rest: (
            of(name, layers, *rest) | ({"backend": "abacus"} if layers == 11 else {})
        ),
    )
    with pytest.raises(SystemExit) as ended:
        run("--networks original --layers 11 20 --batch 4 --again --output", tmp_path)
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert re.search("^original-11: failed: .*abacus", told.err)
    assert "1 of 2 could not be measured: original-11" in told.err
    assert "original-20: activations x" in told.out
    [record] = depth.read(tmp_path)
    # the same seed: the same weights
    assert record["loss"] == pytest.approx(known["loss"], rel=1e-3)
    assert record.keys() == known.keys()
    assert all(
        record[key] == known[key]
        for key in ("settings", "units", "parameters", "data", "device", "code")
    )
    assert 1e8 < record["cost"]["peak_resident_bytes"] < 1e11


def test_plain_is_not_measured_where_it_overflows(tmp_path, capsys):
    run("--networks plain --layers 1001 --output", tmp_path)
    assert (
        "plain-1001: left out, gradients of more than 506 layers of it overflow float32"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--layers 100", "the nearest are 92 and 101"),
        ("--layers 2", "the nearest are 11 and 20"),
        ("--batch 1", "at least 2"),
        ("--limit nan", "positive number of seconds"),
    ],
)
def test_mistakes(tmp_path, capsys, options, part):
    assert part in error_of(capsys, run, options, "--output", tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 2}', '{"format": 1, "settings": {"network": "preact"}}']
)
def test_damaged_file(tmp_path, text):
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "preact-20.json").write_text(text)
    with pytest.raises(ValueError, match=r"preact-20\.json (holds no measurement|has a format)"):
        depth.read(tmp_path)


def test_table(smoke):
    (smoke / "depth" / ".original-20-x1.json").write_text("{")  # as a killed process leaves it
    records = depth.read(smoke)
    assert [(r["settings"]["network"], r["settings"]["layers"]) for r in records] == [
        ("preact_scaled", 11),
        ("preact_scaled", 20),
        ("original", 11),
        ("original", 20),
    ]
    heading, rule, *rows = depth.table([*records, records[0] | {"growth": None}]).splitlines()
    assert heading.count("|") == rule.count("|") == 7
    cells = [cell.strip() for cell in rows[3].strip("|").split("|")]
    growth, ratio = records[3]["growth"], records[3]["gradient_ratio"]
    assert cells[:4] == ["original", "20", f"{growth:.3g}", f"{ratio:.3g}"]
    assert "| not finite |" in rows[4]


def test_figure(smoke, tmp_path):
    from PIL import Image

    records = depth.read(smoke)
    overflown = {
        key: [None] * len(values) for key, values in records[0]["profile"].items() if key != "unit"
    }
    counts = []
    for drawn in (records, [records[0] | {"profile": records[0]["profile"] | overflown}]):
        depth.figure(drawn, tmp_path / "depth.png")
        with Image.open(tmp_path / "depth.png") as picture:
            assert picture.format == "PNG"
            seen = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24)}
        # a colour per depth
        counts.append([seen.get(line, 0) for line in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00))])
    (first, second), (in_legend, none) = counts
    assert first > 2 * in_legend > 0
    assert second > none == 0
    with pytest.raises(ValueError, match="no measurement of a depth"):
        depth.figure([], tmp_path / "none.png")
