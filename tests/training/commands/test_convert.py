"""`keras-preact convert`: it converts files of other libraries to networks and back, or
ends with one clear error.
"""

import re

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import weights
from tests.keras_preact.harness import randomize
from tests.training.calls import error_of, files
from training import cli
from training.commands.convert import FormatName, convert
from training.directory.formats import FORMATS

OPTIONS = {"block": "basic", "width_factor": 0.125, "classes": 3, "input_shape": (32, 32, 3)}


def run(*arguments):
    cli.main("convert", convert, list(map(str, arguments)))


def outputs(model, channels=3):
    x = np.random.default_rng(2).normal(size=(2, 32, 32, channels)).astype("float32")
    return keras.ops.convert_to_numpy(model(x, training=False))


def load(path):
    return keras.saving.load_model(path, compile=False)


@pytest.fixture(scope="module")
def imagenet():
    model = kp.models.resnet_imagenet(
        (1, 1, 1, 1), arrangement="full_preactivation_raw_stem", **OPTIONS
    )
    randomize(model)
    return model


@pytest.fixture(scope="module")
def cifar():
    model = kp.models.resnet_cifar(8, width_factor=0.25)
    randomize(model)
    return model


def test_every_format_has_its_name_on_the_command_line():
    assert {"auto", *FORMATS} == set(FormatName.__args__)


class TestConverting:
    @pytest.mark.parametrize("kind", ["timm", "torch_cifar", "pytorchcv"])
    def test_there_and_back(self, imagenet, cifar, tmp_path, capsys, kind):
        if kind == "pytorchcv":
            model = kp.models.resnet_cifar(
                8, arrangement="full_preactivation_raw_stem", shape_shortcut="projection"
            )
            randomize(model)
        else:
            model = {"timm": imagenet, "torch_cifar": cifar}[kind]
        state = getattr(weights, f"to_{kind}")(model)
        theirs, ours, back = (
            tmp_path / name for name in ("a.safetensors", "net.keras", "b.safetensors")
        )
        weights.write_state(theirs, state)
        size = ("--input-shape", 32, 32, 3) if kind == "timm" else ()
        run(theirs, ours, *size)
        assert f"({kind}): " in capsys.readouterr().out
        np.testing.assert_allclose(outputs(load(ours)), outputs(model), rtol=1e-5, atol=1e-6)
        target = ("--target-format", kind) if kind == "pytorchcv" else ()
        run(ours, back, *target)
        before, after = (weights.read_state(path) for path in (theirs, back))
        assert before.keys() == after.keys()
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array)

    def test_half(self, cifar, tmp_path, capsys):
        cifar.save(tmp_path / "net.keras")
        for options in ([], ["--half", "--overwrite"]):
            run(tmp_path / "net.keras", tmp_path / "net.weights.h5", *options)
        whole, half = re.findall(r"\(keras_preact, ([\d.]+) kB\)", capsys.readouterr().out)
        assert float(half) < 0.7 * float(whole)
        model = kp.models.resnet_cifar(8, width_factor=0.25)
        model.load_weights(tmp_path / "net.weights.h5")
        for got, want in zip(model.get_weights(), cifar.get_weights(), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want.astype("float16").astype("float32"))
        # values beyond float16 and formats without half precision are errors
        model.get_layer("head_classifier").kernel.assign(np.full((16, 10), 1e5))
        model.save(tmp_path / "large.keras")
        for name, words in (("new.weights.h5", "beyond float16"), ("a.keras", "--half is for")):
            command = (tmp_path / "large.keras", tmp_path / name, "--half")
            assert words in error_of(capsys, run, *command)
            assert not (tmp_path / name).exists()

    def test_a_sample_is_compared(self, imagenet, tmp_path, capsys):
        weights.write_state(tmp_path / "timm.safetensors", weights.to_timm(imagenet))
        images = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype("float32")
        right = keras.ops.convert_to_numpy(imagenet(images))
        command = (tmp_path / "timm.safetensors", tmp_path / "net.keras", "--check")
        for name, shift in (("wrong", 0.1), ("right", 0.0)):
            np.savez(tmp_path / f"{name}.npz", images=images, outputs=right + shift)
        np.savez(tmp_path / "other.npz", images=images)
        for name, words in (("wrong", "difference from"), ("other", "`images` and `outputs`")):
            assert words in error_of(capsys, run, *command, tmp_path / f"{name}.npz")
            assert not (tmp_path / "net.keras").exists()
        run(*command, tmp_path / "right.npz")
        assert weights.ASSUMPTIONS["timm"] not in capsys.readouterr().out

    def test_other_channels_and_classes(self, imagenet, tmp_path, capsys):
        imagenet.save(tmp_path / "own.keras")
        size = ("--classes", 7, "--input-shape", 32, 32, 1)
        run(tmp_path / "own.keras", tmp_path / "net.keras", *size)
        model = load(tmp_path / "net.keras")
        assert (model.input_shape, model.output_shape) == ((None, 32, 32, 1), (None, 7))
        output = capsys.readouterr().out
        assert "Channels: 1 instead of 3. The first kernel" in output
        assert "Classes: 7 instead of 3. The classifier is new" in output
        own, given = weights.to_timm(model), weights.to_timm(imagenet)
        np.testing.assert_array_equal(own["norm.bias"], given["norm.bias"])


class TestErrors:
    def test_what_does_not_fit_is_listed_and_nothing_written(self, imagenet, tmp_path, capsys):
        state = weights.to_timm(imagenet)
        state["se.weight"] = state.pop("stages.0.blocks.0.norm1.bias")
        state["norm.weight"] = np.zeros(3, "float32")
        weights.write_state(tmp_path / "w.safetensors", state)
        error = error_of(capsys, run, tmp_path / "w.safetensors", tmp_path / "net.keras")
        for part in (
            "1 missing",
            "1 left over: se.weight",
            "is (64,) here and (3,) there",
            "Nothing was",
        ):
            assert part in error
        assert files(tmp_path) == ["w.safetensors"]

    def test_files_that_are_there_stay(self, cifar, tmp_path, capsys):
        cifar.save(tmp_path / "net.keras")
        (tmp_path / "w.safetensors").write_text("mine")
        command = (tmp_path / "net.keras", tmp_path / "w.safetensors")
        assert "Add --overwrite to replace it" in error_of(capsys, run, *command)
        assert (tmp_path / "w.safetensors").read_text() == "mine"
        run(*command, "--overwrite")
        assert "8.bias" in weights.read_state(tmp_path / "w.safetensors")

    def test_paths_and_formats(self, cifar, tmp_path, capsys):
        cifar.save(tmp_path / "net.keras")
        (tmp_path / "damaged.keras").write_text("no zip")
        (tmp_path / "folder.keras").mkdir()
        np.savez(tmp_path / "other.npz", w=np.zeros(2))
        before = files(tmp_path)
        for source, out, options, message in (
            ("net.keras", "w.pth", (), "--target-format auto writes .keras or"),
            ("net.keras", "w.keras", ("--target-format", "timm"), "timm writes .safetensors files"),
            ("net.keras", "w.safetensors", ("--target-format", "timm"), "timm's ResNetV2 does: "),
            ("net.keras", "missing/w.keras", (), "The folder "),
            ("net.keras", "folder.keras", ("--overwrite",), "is a folder"),
            ("missing.keras", "w.keras", (), "missing.keras does not exist"),
            ("damaged.keras", "w.keras", (), "damaged"),
            ("other.npz", "w.keras", (), "is unknown. It has w. Name it with --source-format"),
            ("other.npz", "w.keras", ("--source-format", "timm"), "no weights of a timm ResNetV2"),
            ("other.npz", "w.keras", ("--source-format", "keras_preact"), "is for a .keras file"),
            (
                "net.keras",
                "w.keras",
                ("--source-format", "timm"),
                "has the format keras_preact",
            ),
        ):
            command = (tmp_path / source, tmp_path / out, *options)
            assert message in error_of(capsys, run, *command)
        assert files(tmp_path) == before
