"""`keras-preact convert`: files of other libraries become networks here and the other
way round, or one clear error.
"""

import re

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import weights
from tests.keras_preact.harness import randomize
from tests.training.commands import files
from training import cli
from training.convert import FormatName, convert
from training.formats import FORMATS

OPTIONS = {"block": "basic", "width_factor": 0.125, "classes": 3, "input_shape": (32, 32, 3)}


def run(*arguments):
    cli.main("convert", convert, list(map(str, arguments)))


def fails(capsys, *arguments) -> tuple[list[str], str]:
    """Run a command line that must end with status 2; return the lines in front of the
    error on stderr, and the error.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    *lines, error = err.splitlines()
    assert error.startswith("error: ")
    return lines, error


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


@pytest.mark.backend
def test_every_format_has_its_name_on_the_command_line():
    assert {"auto", *FORMATS} == set(FormatName.__args__)


class TestConverting:
    @pytest.mark.backend
    def test_timm(self, imagenet, tmp_path, capsys):
        weights.write_state(tmp_path / "timm.safetensors", weights.to_timm(imagenet))
        run(tmp_path / "timm.safetensors", tmp_path / "net.keras", "--input-shape", 32, 32, 3)
        printed = capsys.readouterr().out.splitlines()
        assert printed[0].endswith(
            f"timm.safetensors (timm): resnetv2_1_1_1_1, {imagenet.count_params():,} parameters."
        )
        assert printed[1].startswith(weights.ASSUMPTIONS["timm"])
        assert printed[2].startswith(f"Wrote {tmp_path / 'net.keras'} (keras_preact, ")
        assert len(printed) == 3
        model = load(tmp_path / "net.keras")
        np.testing.assert_allclose(outputs(model), outputs(imagenet), rtol=1e-5, atol=1e-6)
        run(tmp_path / "net.keras", tmp_path / "back.safetensors")
        before, after = (
            weights.read_state(tmp_path / f"{name}.safetensors") for name in ("timm", "back")
        )
        assert before.keys() == after.keys()
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array)
        run(tmp_path / "net.keras", tmp_path / "net.weights.h5")
        model.set_weights([np.zeros(w.shape) for w in model.weights])
        model.load_weights(tmp_path / "net.weights.h5")
        np.testing.assert_allclose(outputs(model), outputs(imagenet), rtol=1e-5, atol=1e-6)
        assert files(tmp_path) == [
            "back.safetensors",
            "net.keras",
            "net.weights.h5",
            "timm.safetensors",
        ]

    @pytest.mark.backend
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

    @pytest.mark.backend
    def test_half_refuses_what_it_cannot_hold(self, tmp_path, capsys):
        model = kp.models.resnet_cifar(8, width_factor=0.25)
        model.get_layer("head_classifier").kernel.assign(np.full((16, 10), 1e5))
        model.save(tmp_path / "net.keras")
        for name, words in (("net.weights.h5", "beyond float16"), ("new.keras", "--half is for")):
            assert words in fails(capsys, tmp_path / "net.keras", tmp_path / name, "--half")[1]
        assert files(tmp_path) == ["net.keras"]

    @pytest.mark.backend
    def test_a_sample_is_compared(self, imagenet, tmp_path, capsys):
        weights.write_state(tmp_path / "timm.safetensors", weights.to_timm(imagenet))
        images = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype("float32")
        right = keras.ops.convert_to_numpy(imagenet(images))
        command = (tmp_path / "timm.safetensors", tmp_path / "net.keras", "--check")
        for name, shift in (("wrong", 0.1), ("right", 0.0)):
            np.savez(tmp_path / f"{name}.npz", images=images, outputs=right + shift)
        np.savez(tmp_path / "other.npz", images=images)
        for name, words in (("wrong", "difference from"), ("other", "`images` and `outputs`")):
            assert words in fails(capsys, *command, tmp_path / f"{name}.npz")[1]
            assert not (tmp_path / "net.keras").exists()
        run(*command, tmp_path / "right.npz")
        assert weights.ASSUMPTIONS["timm"] not in capsys.readouterr().out

    @pytest.mark.backend
    def test_torch_cifar(self, cifar, tmp_path, capsys):
        np.savez(tmp_path / "torch.npz", **weights.to_torch_cifar(cifar))
        run(tmp_path / "torch.npz", tmp_path / "net.keras")
        assert "(torch_cifar): cifar_resnet8" in capsys.readouterr().out
        np.testing.assert_allclose(
            outputs(load(tmp_path / "net.keras")), outputs(cifar), rtol=1e-5, atol=1e-6
        )
        run(tmp_path / "net.keras", tmp_path / "back.safetensors")
        assert (
            weights.read_state(tmp_path / "back.safetensors").keys()
            == weights.to_torch_cifar(cifar).keys()
        )

    @pytest.mark.soak
    def test_keras_applications(self, tmp_path, capsys):
        theirs = keras.applications.ResNet50V2(
            weights=None, include_top=False, pooling="avg", input_shape=(32, 32, 3)
        )
        theirs.save(tmp_path / "theirs.keras")
        run(tmp_path / "theirs.keras", tmp_path / "ours.keras")
        assert "(keras_applications): " in capsys.readouterr().out
        target = ("--target-format", "keras_applications")
        run(tmp_path / "ours.keras", tmp_path / "back.keras", *target)
        expected = outputs(theirs)
        for name in ("ours", "back"):
            model = load(tmp_path / f"{name}.keras")
            np.testing.assert_allclose(
                outputs(model), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
            )

    @pytest.mark.backend
    @pytest.mark.parametrize("source", ["timm.safetensors", "own.keras"])
    def test_other_channels_and_classes(self, imagenet, tmp_path, capsys, source):
        weights.write_state(tmp_path / "timm.safetensors", weights.to_timm(imagenet))
        imagenet.save(tmp_path / "own.keras")
        run(tmp_path / source, tmp_path / "net.keras", "--classes", 7, "--input-shape", 32, 32, 1)
        assert capsys.readouterr().out.splitlines()[-3:-1] == [
            "1 channels instead of 3: the first kernel was adapted.",
            "7 classes instead of 3: the classifier is new and must be trained.",
        ]
        model = load(tmp_path / "net.keras")
        assert (model.input_shape, model.output_shape) == ((None, 32, 32, 1), (None, 7))
        own, given = weights.to_timm(model), weights.to_timm(imagenet)
        np.testing.assert_allclose(
            own["stem.conv.weight"], given["stem.conv.weight"].sum(1, keepdims=True), atol=1e-6
        )
        np.testing.assert_array_equal(own["norm.bias"], given["norm.bias"])


@pytest.mark.backend
class TestErrors:
    def test_what_does_not_fit_is_listed_and_nothing_written(self, imagenet, tmp_path, capsys):
        state = weights.to_timm(imagenet)
        state["se.weight"] = state.pop("stages.0.blocks.0.norm1.bias")
        state["norm.weight"] = np.zeros(3, "float32")
        weights.write_state(tmp_path / "w.safetensors", state)
        lines, error = fails(capsys, tmp_path / "w.safetensors", tmp_path / "net.keras")
        assert lines == [
            f"{tmp_path / 'w.safetensors'}:",
            "  1 missing in the file",
            "    stage1_unit1/branch/norm_0/beta",
            "  1 unused in the file",
            "    se.weight",
            "  1 of another shape",
            "    head_norm/gamma: (64,) in the network, (3,) in the file",
        ]
        assert "Nothing was written." in error
        assert files(tmp_path) == ["w.safetensors"]

    def test_a_network_that_the_target_lacks(self, cifar, tmp_path, capsys):
        cifar.save(tmp_path / "cifar.keras")
        _, error = fails(
            capsys, tmp_path / "cifar.keras", tmp_path / "w.safetensors", "--target-format", "timm"
        )
        assert "timm's ResNetV2 does: arrangement=" in error
        assert files(tmp_path) == ["cifar.keras"]

    def test_files_that_are_there_stay(self, cifar, tmp_path, capsys):
        cifar.save(tmp_path / "net.keras")
        (tmp_path / "w.safetensors").write_text("mine")
        _, error = fails(capsys, tmp_path / "net.keras", tmp_path / "w.safetensors")
        assert "add --overwrite to replace it" in error
        assert (tmp_path / "w.safetensors").read_text() == "mine"
        run(tmp_path / "net.keras", tmp_path / "w.safetensors", "--overwrite")
        assert "8.bias" in weights.read_state(tmp_path / "w.safetensors")

    def test_paths_and_formats(self, cifar, tmp_path, capsys):
        cifar.save(tmp_path / "net.keras")
        (tmp_path / "damaged.keras").write_text("no zip")
        (tmp_path / "folder.keras").mkdir()
        np.savez(tmp_path / "other.npz", w=np.zeros(2))
        before = files(tmp_path)
        auto = "--target-format auto writes .keras or .weights.h5 or .safetensors files"
        timm = "--target-format timm writes .safetensors files"
        unknown = "is unknown. It has w. Name it with --source-format"
        for source, out, options, message in (
            ("net.keras", "w.pth", (), auto),
            ("net.keras", "w.keras", ("--target-format", "timm"), timm),
            ("net.keras", "missing/w.keras", (), "The folder "),
            ("net.keras", "folder.keras", ("--overwrite",), "it is a folder"),
            ("missing.keras", "w.keras", (), "missing.keras does not exist"),
            ("damaged.keras", "w.keras", (), "damaged"),
            ("other.npz", "w.keras", (), unknown),
            ("other.npz", "w.keras", ("--source-format", "timm"), "no weights of a timm ResNetV2"),
            ("other.npz", "w.keras", ("--source-format", "keras_preact"), "is for a .keras file"),
        ):
            _, error = fails(capsys, tmp_path / source, tmp_path / out, *options)
            assert message in error
        assert files(tmp_path) == before
