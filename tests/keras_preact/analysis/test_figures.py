"""The figures: they hold the numbers they are given, and the diagrams hold the rows of
the tables, in order.
"""

import itertools
import re
import sys

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.analysis import figures
from keras_preact.analysis.ensemble import Lesions
from keras_preact.analysis.figures import style
from keras_preact.analysis.identities import DirectPath, IdentityCheck
from keras_preact.analysis.jacobians import Spectrum
from keras_preact.analysis.mean_field import MeanField, PhaseDiagram
from keras_preact.analysis.propagation import Propagation
from keras_preact.health.ranges import HEALTHY_RANGES
from tests import layout
from tests.keras_preact import harness
from tests.reference import FIG_4, KERNELS

UNITS = ("stage1_unit1", "stage1_unit2", "stage2_unit1")


def signals(seed=0, units=UNITS, **changes) -> Propagation:
    """Make up the signals of a network."""
    rng = np.random.default_rng(seed)
    names = ("residual_norm", "residual_mean", "residual_std", "shortcut_norm", "cut", "dead")
    fields = {name: rng.uniform(0.1, 1, len(units)) for name in names}
    fields |= {
        name: rng.uniform(0.1, 1, len(units) + 1)
        for name in ("x_norm", "x_mean", "x_std", "gradient_norm")
    }
    weights = {
        name: rng.uniform(0.1, 1, len(units))
        for name in ("branch/conv_1/kernel", "branch/norm_1/gamma")
    }
    return Propagation(
        **{"units": units, "weight_gradients": weights, "loss": 2.0, **fields, **changes}
    )


def labelled(axes) -> dict[str, np.ndarray]:
    """Return label to y-data of the lines that have a label."""
    return {
        line.get_label(): line.get_ydata()
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def title(axes) -> str:
    """Return the title of axes on one line."""
    return axes.get_title(loc="left").replace("\n", " ")


ROWS = np.array(
    [[1e-7, np.nan, 2e-7], [1.0, np.nan, 3.0], [0.5, np.nan, 0.25], [1e-8, np.nan, 1e-7]]
)
CHECK = IdentityCheck(UNITS, np.array([0, -1, 2]), *ROWS)
PATH = DirectPath(UNITS, np.array([0.25, 0.5, 1, 1]), np.array([0.5, 0.75, 1, 1]))
NETS = {"a": signals(0), "b": signals(1)}
RATIO = {
    "net": signals(residual_norm=np.array([1.0, 1, 3]), shortcut_norm=np.array([2.0, 1, 1])),
    "plain": signals(shortcut_norm=np.zeros(3)),
}
SOME = {"a/kernel": np.array([1.0, np.nan, 3]), "b/kernel": np.array([np.nan, 2.0, np.nan])}

#: Figures by depth: what draws them, the values of each panel's lines, and a part of the first
#: title.
BY_DEPTH = {
    "gradient norms": (
        lambda: figures.gradient_norms(NETS),
        [{name: net.gradient_norm for name, net in NETS.items()}],
        "times that after the last unit",
    ),
    "activation norms": (
        lambda: figures.activation_norms(NETS),
        [{name: net.x_norm for name, net in NETS.items()}],
        "times that before the first unit",
    ),
    "ratio": (
        lambda: figures.residual_ratio(RATIO),
        [{"net": [0.5, 1, 3], "plain": [np.nan] * 3}],
        "adds 1 times",
    ),
    "ratio of a plain network": (
        lambda: figures.residual_ratio({"plain": RATIO["plain"]}),
        [{"plain": [np.nan] * 3}],
        "adds inf times",
    ),
    "truncation": (
        lambda: figures.truncation(NETS),
        [{name: getattr(net, field) for name, net in NETS.items()} for field in ("cut", "dead")],
        "Sums that f sets to 0: at most",
    ),
    "weight gradients": (
        lambda: figures.weight_gradients(NETS),
        [
            {"branch/conv_1/kernel": net.weight_gradients["branch/conv_1/kernel"]}
            for net in NETS.values()
        ],
        "Gradients of the kernels: a",
    ),
    "weights that some units lack": (
        lambda: figures.weight_gradients({"net": signals(weight_gradients=SOME)}),
        [{"a/kernel": [1, 3], "b/kernel": [2]}],
        "Gradients of the kernels: net",
    ),
    "gradient split": (
        lambda: figures.gradient_split(CHECK),
        [
            {"through shortcuts": ROWS[1], "through branches": ROWS[2]},
            {"Eq. 4 (forward)": ROWS[0], "Eq. 5 (backward)": ROWS[3]},
        ],
        "Gradient through the shortcuts",
    ),
    "direct paths": (
        lambda: figures.direct_paths({"net": PATH}),
        [{"net": PATH.gain}, {"net": PATH.survival}],
        "At least 25 %",
    ),
}


@pytest.mark.parametrize("name", BY_DEPTH)
def test_figures_by_depth(name):
    draw, panels, words = BY_DEPTH[name]
    figure = draw()
    assert words in title(figure.axes[0])
    for axes, series in zip(figure.axes, panels, strict=True):
        drawn = labelled(axes)
        assert list(drawn) == list(series)
        for label, values in series.items():
            np.testing.assert_array_equal(drawn[label], values)
        assert axes.get_ylabel()
    assert figure.axes[-1].get_xlabel()
    layout.check(figure)


class TestPropagation:
    def test_title_says_the_ratio(self):
        net = signals(gradient_norm=np.array([30.0, 1.0, 1.0, 2.0]))
        assert "15 times" in title(figures.gradient_norms({"a": net}).axes[0])

    @pytest.mark.parametrize(("most", "scale"), [(9, "linear"), (11, "log")])
    def test_more_than_a_decade_is_logarithmic(self, most, scale):
        figure = figures.activation_norms({"a": signals(x_norm=np.array([1.0, 2, most, 3]))})
        assert figure.axes[0].get_yscale() == scale

    def test_stages_are_marked_where_they_begin(self):
        axes = figures.gradient_norms({"a": signals()}).axes[0]
        assert [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2] == [2]
        assert [text.get_text() for text in axes.texts] == ["stage 1", "stage 2"]
        others = signals(units=("stage1_unit1", "stage2_unit1"))
        assert not figures.gradient_norms({"a": signals(), "b": others}).axes[0].texts

    def test_units_are_at_their_numbers_and_lines_have_one_look(self):
        lines = figures.weight_gradients({"net": signals(weight_gradients=SOME)}).axes[0].lines
        assert [line.get_xdata().tolist() for line in lines[:2]] == [[0, 2], [1]]
        drawn = [axes.lines[:2] for axes in figures.truncation(NETS).axes]
        for one, other in zip(*drawn, strict=True):
            assert one.get_color() == other.get_color()
        split = [axes.lines[:2] for axes in figures.gradient_split(CHECK).axes]
        assert len({line.get_color() for lines in split for line in lines}) == 4

    def test_errors_of_the_identities_are_in_the_title(self):
        figure = figures.gradient_split(CHECK)
        assert title(figure.axes[1]) == "Eq. 4 is off by 2.0e-07, Eq. 5 by 1.0e-07 at most"

    def test_errors(self):
        for draw in (
            figures.gradient_norms,
            figures.activation_norms,
            figures.weight_gradients,
            figures.residual_ratio,
            figures.truncation,
            figures.direct_paths,
        ):
            with pytest.raises(ValueError, match="empty mapping"):
                draw({})
        with pytest.raises(
            ValueError, match=r"No unit of 'a' has a kernel. Received: branch/scale"
        ):
            figures.weight_gradients({"a": signals(weight_gradients={"branch/scale": np.ones(3)})})


@pytest.mark.backend
class TestChannels:
    @pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
    @pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
    def test_profile_is_the_mean_size_of_unit_outputs(self, stacked, training):
        model = kp.models.resnet_cifar(
            26, input_shape=(8, 8, 1), width_factor=0.25, stacked=stacked
        )
        harness.randomize(model)
        assert harness.longest_stack(model) == (3 if stacked else 0)
        x = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype("float32")
        before = [np.array(weight) for weight in model.get_weights()]
        profile = figures.channel_profile(model, x, training=training)
        for weight, old in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weight, old)
        outputs = keras.Model(model.input, model.unit_outputs)(x, training=training)
        assert profile.units == tuple(f"stage{s}_unit{u}" for s in (1, 2, 3) for u in (1, 2, 3, 4))
        assert profile.size.shape == (16, 12)
        for i, output in enumerate(outputs):
            want = np.abs(keras.ops.convert_to_numpy(output)).mean((0, 1, 2))
            np.testing.assert_allclose(profile.size[: len(want), i], want, rtol=1e-4)
            assert np.isnan(profile.size[len(want) :, i]).all()

    def test_channels_first(self):
        if keras.backend.backend() == "tensorflow":
            pytest.skip("TensorFlow's convolutions on a CPU want the channels last")
        model = kp.models.resnet_cifar(
            8, input_shape=(1, 8, 8), width_factor=0.25, data_format="channels_first"
        )
        assert figures.channel_profile(model, np.ones((2, 1, 8, 8))).size.shape == (16, 3)

    def test_heat_map(self):
        size = np.array([[1.0, 2.0, 0.0], [np.nan, 4.0, 100.0]])
        figure = figures.channel_heat_map(figures.ChannelProfile(UNITS, size))
        picture = figure.axes[0].images[0]
        drawn = picture.get_array()
        np.testing.assert_array_equal(drawn.mask, [[False, False, True], [True, False, False]])
        np.testing.assert_array_equal(drawn.compressed(), [1, 2, 4, 100])
        assert picture.get_extent() == [0.5, 3.5, -0.5, 1.5]
        assert "20 % are 0" in title(figure.axes[0])
        layout.check(figure)

    def test_heat_map_of_nothing(self):
        layout.check(figures.channel_heat_map(figures.ChannelProfile(UNITS[:1], np.zeros((2, 1)))))

    def test_to_dict(self):
        profile = figures.ChannelProfile(("a",), np.array([[1.0], [np.nan]]))
        assert profile.to_dict() == {"units": ["a"], "size": [[1.0], [None]]}


#: What the reference's symbols are called in a diagram.
WORDS = {"N": "BN", "A": "ReLU"}

#: Shortcut to the boxes on it, behind F and in the gate: Fig. 2 and Table 1.
FIG_2 = {
    "identity": ([], [], []),
    "constant_scaling": (["* 0.5"], ["* 0.5"], []),
    "exclusive_gating": (["* (1 - g)"], ["* g"], ["1x1 conv", "sigmoid"]),
    "shortcut_only_gating": (["* (1 - g)"], [], ["1x1 conv", "sigmoid"]),
    "conv1x1": (["1x1 conv"], [], []),
    "dropout": (["dropout 0.5"], [], []),
    "none": ([], [], []),
}


def symbols_to_words(symbols: str, block: str) -> list[str]:
    words = []
    for symbol in symbols.replace("|", " ").split():
        size = KERNELS[block][int(symbol[1:]) - 1] if symbol[0] == "W" else None
        words.append(WORDS.get(symbol[0]) or f"{size}x{size} conv")
    return words


def texts_by_height(axes) -> list[str]:
    """Return what a drawn diagram's boxes say, from left to right and from top to
    bottom.
    """
    boxes = {
        (text.get_position()): text.get_text()
        for text in axes.texts
        if not text.get_text().startswith("$")
    }
    boxes = {place: text for place, text in boxes.items() if text not in ("+", "")}
    return [boxes[place] for place in sorted(boxes, key=lambda place: (place[0], -place[1]))]


class TestDiagrams:
    @pytest.mark.parametrize("block", ["single", "basic", "bottleneck"])
    @pytest.mark.parametrize("arrangement", FIG_4)
    def test_boxes_are_those_of_the_paper_in_order(self, arrangement, block):
        before, after = FIG_4[arrangement][len(KERNELS[block])].split("+")
        for shortcut, (on_shortcut, on_branch, gate) in FIG_2.items():
            parts = figures.diagram(arrangement, shortcut, block)
            assert [box.text for box in parts.branch] == symbols_to_words(before, block) + on_branch
            assert [box.text for box in parts.after_addition] == symbols_to_words(after, block)
            assert [box.text for box in parts.shortcut] == on_shortcut
            assert [box.text for box in parts.gate] == gate
            assert parts.connected == (shortcut != "none")

    @pytest.mark.parametrize("shortcut", FIG_2)
    def test_drawing(self, shortcut):
        """Paths are side by side, each from top to bottom; f is below the addition."""
        parts = figures.diagram("original", shortcut, "bottleneck")
        figure = figures.unit_diagram("original", shortcut, "bottleneck")
        [axes] = figure.axes
        left = [box.text for box in (*parts.shortcut, *parts.after_addition)]
        want = [*left, *(box.text for box in (*parts.gate, *parts.branch))]
        assert texts_by_height(axes) == [
            text.replace("* ", "\N{MULTIPLICATION SIGN} ") for text in want
        ]
        assert len(axes.patches) == len(parts.boxes)
        heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
        assert heights["$x_l$"] > max(patch.get_y() for patch in axes.patches)
        assert heights["$x_{l+1}$"] < min(patch.get_y() for patch in axes.patches)
        assert ("+" in heights) == parts.connected
        if parts.connected:
            assert heights["ReLU"] < heights["+"] < heights[texts_by_height(axes)[-1]]
        layout.check(figure)

    def test_no_two_boxes_overlap(self):
        drawn = (figures.shortcuts_figure(), figures.arrangements_figure("bottleneck"))
        for axes in (axes for figure in drawn for axes in figure.axes):
            for one, other in itertools.combinations(axes.patches, 2):
                apart = np.abs(np.subtract(one.get_bbox().p0, other.get_bbox().p0))
                assert (apart >= (one.get_width(), one.get_height())).any()

    @pytest.mark.parametrize(
        ("block", "want"),
        [
            ("dense", ["LN", "dense", "gelu", "dense"]),
            ("attention", ["LN", "attention"]),
            ("mlp", ["LN", "dense", "gelu", "dense"]),
            ("swiglu", ["LN", "dense", "silu", "* dense", "dense"]),
        ],
    )
    def test_blocks_of_vectors(self, block, want):
        parts = figures.diagram("pre_norm", block=block, normalization="layer", activation="gelu")
        assert [box.text for box in parts.branch] == want
        layout.check(figures.unit_diagram("pre_norm", block=block))

    def test_without_normalization(self):
        parts = figures.diagram("original", normalization="none")
        assert [box.text for box in (*parts.branch, *parts.after_addition)] == [
            "3x3 conv",
            "ReLU",
            "3x3 conv",
            "ReLU",
        ]

    def test_a_new_row_draws_itself(self):
        row = kp.Arrangement(
            first=("shift", "activation"),
            between=("norm",),
            last=("scale",),
            after_addition=("norm",),
        )

        class Halved(kp.shortcuts.ConstantScaling):
            pass

        class Squared(kp.shortcuts.Shortcut):
            def paths(self, x, residual, training=None):
                return x * x, residual

        parts = figures.diagram(row, Halved(0.25, 1.0), "basic")
        assert [box.text for box in parts.branch] == [
            "+ b",
            "ReLU",
            "3x3 conv",
            "BN",
            "3x3 conv",
            "* a",
        ]
        assert [box.text for box in parts.shortcut] == ["* 0.25"]
        assert [box.text for box in figures.diagram(row, Squared()).shortcut] == ["Squared"]
        layout.check(figures.unit_diagram(row, Squared()))

    @pytest.mark.parametrize(
        ("block", "errors"),
        [
            ("basic", ["6.61 %", "8.17 %", "7.84 %", "6.71 %", "6.37 %", "no published error"]),
            (
                "bottleneck",
                ["5.93 %", "6.50 %", "6.14 %", "5.91 %", "5.46 %", "no published error"],
            ),
            ("single", ["no published error"] * 6),
        ],
        ids=["basic", "bottleneck", "single"],
    )
    def test_figure_4(self, block, errors):
        figure = figures.arrangements_figure(block)
        titles = [axes.get_title().replace("\n", " ") for axes in figure.axes]
        names = [
            "original",
            "BN after addition",
            "ReLU before addition",
            "ReLU-only pre-activation",
            "full pre-activation",
        ]
        names.append("BN-only pre-activation")
        assert titles == [f"{name} {error}" for name, error in zip(names, errors, strict=True)]
        layout.check(figure)

    def test_figure_2(self):
        figure = figures.shortcuts_figure()
        titles = [axes.get_title().split("\n")[1] for axes in figure.axes]
        assert titles == [
            "6.61 %",
            "12.35 %",
            "8.70 %",
            "6.91 %",
            "12.22 %",
            "fail (> 20 %)",
            "fail (> 20 %)",
        ]
        layout.check(figure)

    def test_errors(self):
        for arguments in (("orginal",), ("original", "idetity"), ("original", "identity", "basik")):
            with pytest.raises(ValueError, match="Did you mean"):
                figures.unit_diagram(*arguments)
        with pytest.raises(ValueError, match="empty mapping"):
            figures.diagrams_figure({})


class TestSpectra:
    def test_sorted_values_and_histogram(self):
        values = np.array([8.0, 4.0, 1.0, 0.5, 1e-9, 0.0])
        figure = figures.singular_values({"unit": Spectrum(values, (6, 6), exact=True)})
        left, right = figure.axes
        np.testing.assert_array_equal(labelled(left)["unit"], values)
        assert left.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
        counts = right.patches[0].get_data()
        assert counts.values.sum() == 4
        assert counts.edges[0] < 0.5 < 8 < counts.edges[-1]
        assert title(left) == "Singular values: 0.5 to 8, 2 of 6 at 0"
        assert (left.get_yscale(), right.get_xscale()) == ("log", "log")
        layout.check(figure)

    @pytest.mark.parametrize(
        "spectra", [{}, {"zero": Spectrum(np.zeros(2), (2, 2), True)}], ids=["none", "zeros"]
    )
    def test_errors(self, spectra):
        with pytest.raises(ValueError, match="singular value above 0"):
            figures.singular_values(spectra)


@pytest.mark.backend
class TestTraining:
    def test_curves(self):
        runs = {
            "a": {
                "loss": [2.0, 1.0, 0.1],
                "accuracy": [0.1, 0.5, 1.0],
                "val_accuracy": [0.25, np.nan, 0.75],
            },
            "b": {"loss": [2.0, 1.5], "accuracy": [0.1, 0.2], "val_accuracy": [0.5, 0.625]},
        }
        figure = figures.training_curves(runs, "validation")
        left, right = figure.axes
        assert labelled(left)["a"].tolist() == [2, 1, 0.1]
        np.testing.assert_array_equal(labelled(right)["a"], [75, np.nan, 25])
        np.testing.assert_array_equal(labelled(right)["b"], [50, 37.5])
        assert left.lines[0].get_xdata().tolist() == [1, 2, 3]
        assert left.get_yscale() == "log"
        assert right.get_ylabel() == "Validation error (%)"
        assert title(left) == "Training loss: 0.1 to 1.5 at the end"
        assert title(right) == "Lowest validation error: 25.00 to 37.50 %"
        for one, other in zip(left.lines, right.lines, strict=True):
            assert one.get_color() == other.get_color()
        layout.check(figure)

    def test_the_error_is_that_of_training_if_nothing_else_was_measured(self):
        history = {"loss": [1.0, 0.5], "accuracy": [0.5, 0.9], "val_accuracy": [np.nan] * 2}
        figure = figures.training_curves({"a": history})
        assert figure.axes[1].get_ylabel() == "Training error (%)"
        layout.check(figure)
        figure = figures.training_curves({"a": {"loss": [1.0, 0.5]}})
        assert len(figure.axes) == 1
        layout.check(figure)

    def test_health(self):
        table = {
            "step": [10.0, 20.0],
            "epoch": [0.0, 0.0],
            "gradient_norm": [1.0, 2.0],
            "layer_gradient_ratio": [3.0, np.nan],
            "gradient_norm/a/kernel": [1.0, 2.0],
            "gradient_norm/b/kernel": [4.0, 4.0],
            "gradient_norm/b/gamma": [1e6, 1e6],
            "weight_norm/a/kernel": [10.0, 10.0],
            "weight_norm/b/kernel": [2.0, 0.0],
            "weight_norm/b/gamma": [1.0, 1.0],
            "update_norm/a/kernel": [0.1, 0.2],
            "update_norm/b/kernel": [0.1, 0.3],
            "update_norm/b/gamma": [1e6, 1e6],
            "activation_mean/a/kernel": [-0.1, -20.0],
            "activation_std/a/kernel": [1.0, 1.0],
        }
        figure = figures.training_health({name: np.array(values) for name, values in table.items()})
        panels = {title(axes): labelled(axes) for axes in figure.axes if axes.get_visible()}
        names = {
            key: f"{row.figure[0].upper()}{row.figure[1:]}" for key, row in HEALTHY_RANGES.items()
        }
        panels = {key: panels[name] for key, name in names.items() if name in panels}
        assert panels["gradient_norm"]["network"].tolist() == [1, 2]
        ratio = panels["gradient_weight_ratio"]
        np.testing.assert_allclose(
            [ratio["least"], ratio["median"], ratio["largest"]], [[0.1, 0.2], [1.05, 0.2], [2, 0.2]]
        )
        np.testing.assert_allclose(panels["update_ratio"]["largest"], [0.05, 0.02])
        np.testing.assert_allclose(panels["activation_mean"]["median"], [-0.1, -20])
        assert len(panels) == 6
        layout.check(figure)

    def test_health_of_a_real_run(self, tmp_path):
        x, labels = np.random.default_rng(0).normal(size=(8, 6)).astype("float32"), np.arange(8)
        model = kp.models.dense_resnet(4, input_shape=(6,), width=4)
        model.compile(
            kp.optimizers.CoupledSGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        health = kp.health.TrainingHealth(
            interval=1, csv=tmp_path / "health.csv", report=lambda message: None
        )
        model.fit(x, labels, batch_size=4, verbose=0, callbacks=[health])
        names, *rows = [
            line.split(",") for line in (tmp_path / "health.csv").read_text().splitlines()
        ]
        columns = zip(*([float(cell or "nan") for cell in row] for row in rows), strict=True)
        figure = figures.training_health(dict(zip(names, columns, strict=True)))
        np.testing.assert_allclose(
            labelled(figure.axes[0])["network"],
            [record.gradient_norm for record in health.history],
            rtol=1e-5,
        )
        update = labelled(figure.axes[2])["largest"]
        kernels = [name.endswith("kernel") for name in health.weights]
        np.testing.assert_allclose(
            update, [r.update_ratios[kernels].max() for r in health.history], rtol=1e-5
        )
        layout.check(figure)

    def test_errors(self):
        with pytest.raises(ValueError, match="empty mapping"):
            figures.training_curves({})
        with pytest.raises(ValueError, match=r"needs a `loss`. Received: 'a' with accuracy"):
            figures.training_curves({"a": {"accuracy": [1.0]}})
        with pytest.raises(ValueError, match="Received: 1 columns, 2 rows"):
            figures.training_health({"step": [1.0, 2.0]})


class TestEnsemble:
    def test_errors_by_number_of_units(self):
        found = Lesions(UNITS, ((0,), (1,), (0, 1)), np.array([0.5, 0.25, 0.75]), 0.125)
        figure = figures.lesion_errors(found)
        axes = figure.axes[0]
        assert axes.lines[0].get_xdata().tolist() == [0, 1, 2]
        assert axes.lines[0].get_ydata().tolist() == [12.5, 37.5, 75]
        assert axes.collections[0].get_offsets().tolist() == [[1, 50], [1, 25], [2, 75]]
        layout.check(figure)

    def test_errors_by_unit(self):
        found = Lesions(UNITS, ((0,), (1,), (2,)), np.array([0.5, 0.25, 0.75]), 0.125)
        figure = figures.lesion_errors(found)
        drawn = labelled(figure.axes[0])
        assert drawn["without the unit"].tolist() == [50, 25, 75]
        assert list(drawn["whole network: 12.5 %"]) == [12.5, 12.5]
        assert title(figure.axes[0]).endswith("without stage2_unit1")
        layout.check(figure)

    def test_path_lengths(self):
        shares = kp.analysis.path_lengths(10)
        figure = figures.path_length_shares(shares)
        bars = figure.axes[0].patches
        assert [bar.get_height() for bar in bars] == shares.tolist()
        # within two deviations, 1.58 each, of 5: 2 to 8
        inside = sum([1, 10, 45, 120, 210, 252, 210, 120, 45, 10, 1][2:9]) / 1024
        assert (
            title(figure.axes[0]) == f"{100 * inside:.1f} % of the paths go through 2 to 8 branches"
        )
        layout.check(figure)

    def test_errors(self):
        with pytest.raises(ValueError, match="no removed units"):
            figures.lesion_errors(Lesions(UNITS, (), np.zeros(0), 0.0))
        with pytest.raises(ValueError, match=r"sum of 1. Received: shape=\(3,\)"):
            figures.path_length_shares(np.ones(3))


class TestMeanField:
    WEIGHTS, BIASES = np.array([0.5, 1.0, 2.0]), np.array([0.0, 0.1])
    CHI = np.array([[0.5, 0.4], [1.0, 0.8], [2.0, 1.6]])

    def diagram(self) -> PhaseDiagram:
        scale = np.array([[1.0, 2.0], [np.inf, 3.0], [4.0, 5.0]])
        return PhaseDiagram(
            self.WEIGHTS, self.BIASES, np.ones((3, 2)), self.CHI, np.ones((3, 2)), scale
        )

    def test_phases(self):
        figure = figures.phases(self.diagram(), {"net": (2.0, 0.0)})
        axes = figure.axes[0]
        np.testing.assert_allclose(axes.collections[0].get_array(), np.log10(self.CHI.T))
        [point] = axes.lines
        assert (point.get_xdata()[0], point.get_ydata()[0]) == (2.0, 0.0)
        assert "33 %" in title(axes)
        layout.check(figure)

    def test_depth_scales(self):
        figure = figures.depth_scales(self.diagram())
        first, second = labelled(figure.axes[0]).values()
        np.testing.assert_array_equal(first, [1, np.nan, 4])
        np.testing.assert_array_equal(second, [2, 3, 5])
        assert title(figure.axes[0]) == "Correlations last 1 to 5 layers"
        layout.check(figure)

    def test_correlation_maps(self):
        """The closed form of ReLU: (sqrt(1 - c^2) + (pi - arccos c) c) / pi, arXiv
        1606.05340's kernel of Cho and Saul.
        """
        figure = figures.correlation_maps({"He": MeanField("relu", 2.0)})
        line = next(line for line in figure.axes[0].lines if line.get_label() == "He")
        c = line.get_xdata()
        want = (np.sqrt(1 - c**2) + (np.pi - np.arccos(c)) * c) / np.pi
        np.testing.assert_allclose(line.get_ydata(), want, atol=1e-6)
        layout.check(figure)

    def test_errors(self):
        single = PhaseDiagram(
            self.WEIGHTS[:1], self.BIASES, *(table[:1] for table in [np.ones((3, 2))] * 4)
        )
        for draw in (figures.phases, figures.depth_scales):
            with pytest.raises(ValueError, match="Received: 1 and 2"):
                draw(single)
        with pytest.raises(ValueError, match="empty mapping"):
            figures.correlation_maps({})


def names_at_ends(figure) -> list[tuple[str, object]]:
    """Return the text and the place of the labels at the right of the axes."""
    figure.draw_without_rendering()
    return [
        (text.get_text(), text.get_window_extent())
        for axes in figure.axes
        for text in axes.texts
        if text.get_window_extent().x0 > axes.get_window_extent().x1
    ]


class TestNames:
    """Which line is which."""

    def test_few_lines_have_their_names_at_their_ends(self):
        ends = {"low": 1.0, "high": 9.0, "middle": 5.0, "also low": 1.0}
        nets = {name: signals(x_norm=np.array([3.0, 4.0, 5.0, end])) for name, end in ends.items()}
        figure = figures.activation_norms(nets)
        assert not figure.legends
        assert not names_at_ends(figures.activation_norms({"low": nets["low"]}))  # it is the only
        found = dict(names_at_ends(figure))
        assert sorted(found, key=lambda name: found[name].y0)[2:] == ["middle", "high"]
        axes = figure.axes[0]
        looks = {text.get_text(): text.get_color() for text in axes.texts}
        for line in axes.lines:
            if (name := line.get_label()) in ends:
                height = axes.transData.transform((3, ends[name]))[1]
                assert abs((found[name].y0 + found[name].y1) / 2 - height) < found[name].height
                assert looks[name] == style.text_colour(line.get_color())
        layout.check(figure)

    @pytest.mark.parametrize(
        "nets",
        [
            {f"net {i}": signals(x_norm=np.array([i, 1.0, 2, 3])) for i in range(1, 7)},
            {"a": signals(), "b": signals(units=("stage1_unit1", "stage2_unit1"))},
            {f"a name that is much too long for a label {i}": signals(i) for i in range(2)},
        ],
        ids=["all at one place", "ends apart", "long"],
    )
    def test_else_there_is_a_legend(self, nets):
        figure = figures.activation_norms(nets)
        [legend] = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == list(nets)
        assert not names_at_ends(figure)
        layout.check(figure)

    def test_a_long_legend_takes_no_room_from_the_axes(self):
        heights = []
        for count in (2, 14):
            nets = {f"network number {i} of these": signals(i) for i in range(count)}
            figure = figures.truncation(nets)
            assert figure.legends
            layout.check(figure)
            heights.append([axes.get_window_extent().height for axes in figure.axes])
        few, many = heights
        assert np.all(np.divide(many, few) > 0.9)

    def test_a_panel_without_room_is_named_by_the_other(self):
        nets = {
            name: signals(i, dead=np.zeros(3), cut=np.full(3, i / 4))
            for i, name in enumerate("abcd")
        }
        figure = figures.truncation(nets)
        assert not figure.legends
        assert sorted(name for name, _ in names_at_ends(figure)) == ["a", "b", "c", "d"]
        layout.check(figure)

    def test_many_lines_can_be_told_apart(self):
        figure = figures.gradient_norms({f"net {i}": signals(i) for i in range(20)})
        lines = [line for line in figure.axes[0].lines if line.get_label().startswith("net")]
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20
        assert len(figure.legends[0].get_texts()) == 20
        layout.check(figure)

    @pytest.mark.parametrize(
        ("places", "want"),
        [
            ([5.0], [5.0]),
            ([8.0, 1.0], [8.0, 1.0]),
            ([5.0, 5.0], [4.0, 6.0]),
            ([9.5, 0.2, 9.5], [8.0, 0.2, 10.0]),
            ([0.0, 1.0, 3.5], [0.0, 2.0, 4.0]),
            ([1.0] * 7, None),
        ],
    )
    def test_apart(self, places, want):
        assert style.apart(places, 2.0, 0.0, 10.0) == want


@pytest.mark.backend
def test_no_global_state():
    """pyplot knows of no figure, and no setting has changed."""
    import matplotlib
    from matplotlib import pyplot

    before = dict(matplotlib.rcParams)
    style.svg(figures.arrangements_figure())
    style.svg(figures.training_curves({"a": {"loss": [1.0, 0.5]}}))
    assert not pyplot.get_fignums()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.backend
def test_without_matplotlib(monkeypatch):
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'keras-preact\[training\]'"):
        figures.gradient_norms({"a": signals()})


DRAWN = {
    "bars": lambda: figures.path_length_shares(kp.analysis.path_lengths(4)),
    "lines": lambda: figures.gradient_split(CHECK),
    "shortcuts": figures.shortcuts_figure,
    "attention": lambda: figures.unit_diagram("post_norm", block="attention"),
    "swiglu": lambda: figures.unit_diagram("post_norm", block="swiglu"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_every_colour_is_known_on_dark_pages(name):
    colours = re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", style.svg(DRAWN[name]()))
    assert {colour.upper() for colour in colours} <= {colour.upper() for colour in style.DARK}


@pytest.mark.backend
def test_what_is_on_a_map_stays_dark():
    figure = figures.phases(TestMeanField().diagram(), {"net": (2.0, 0.0)})
    assert style.ON_MAP.lower() in style.svg(figure, dark=True)
