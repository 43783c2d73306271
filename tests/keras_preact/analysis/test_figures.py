"""The figures hold the numbers they are given, and the diagrams the rows of the tables,
in order.
"""

import itertools
import re
import sys

import numpy as np
import pytest

import keras_preact as kp
from keras_preact.analysis import figures
from keras_preact.analysis.contributions import Contributions
from keras_preact.analysis.ensemble import Lesions
from keras_preact.analysis.figures import style
from keras_preact.analysis.identities import CompositeGain, DirectPath, IdentityCheck
from keras_preact.analysis.jacobians import Spectrum
from keras_preact.analysis.mean_field import MeanField
from keras_preact.analysis.propagation import Propagation
from keras_preact.health.ranges import HEALTHY_RANGES
from tests import layout
from tests.keras_preact import harness
from tests.reference import FIG_4, KERNELS

UNITS = ("stage1_unit1", "stage1_unit2", "stage2_unit1")
CONV = "branch/conv_1/kernel"


def signals(seed=0, **changes) -> Propagation:
    """Make up the signals of a network."""
    rng = np.random.default_rng(seed)
    names = ("residual_norm", "residual_mean", "residual_std", "shortcut_norm", "cut", "dead")
    names += ("residual_cosine", "residual_parallel", "output_cosine")
    sizes = dict.fromkeys(names, 3)
    sizes |= dict.fromkeys(("x_norm", "x_mean", "x_std", "gradient_norm"), 4)
    fields = {name: rng.uniform(0.1, 1, size) for name, size in sizes.items()}
    weights = {name: rng.uniform(0.1, 1, 3) for name in (CONV, "branch/norm_1/gamma")}
    fields |= {"units": UNITS, "weight_gradients": weights, "loss": 2.0, **changes}
    return Propagation(**fields)


def labelled(axes) -> dict[str, np.ndarray]:
    """Return label to y-data of the lines that have a label."""
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    return {label: values for label, values in lines.items() if not label.startswith("_")}


def title(axes) -> str:
    """Return the title of axes on one line."""
    return axes.get_title(loc="left").replace("\n", " ")


nan = np.nan
ROWS = np.array([[1e-7, nan, 2e-7], [1.0, nan, 3.0], [0.5, nan, 0.25], [1e-8, nan, 1e-7]])
CHECK = IdentityCheck(UNITS, np.array([0, -1, 2]), *ROWS)
PATH = DirectPath(UNITS, np.array([0.25, 0.5, 1, 1]), np.array([0.5, 0.75, 1, 1]))
GAIN = CompositeGain(UNITS, np.array([1, 1, -1]), np.array([9, 3, nan]), np.array([0.1, 2, nan]))
PLAIN = CompositeGain(UNITS, np.array([0, -1, -1]), *np.array([[0, nan, nan], [0, nan, nan]]))
CHANGING = CompositeGain(UNITS, np.full(3, -1), *np.full((2, 3), nan))
NETS = {"a": signals(0), "b": signals(1)}
RATIO = {
    "net": signals(residual_norm=np.array([1.0, 1, 3]), shortcut_norm=np.array([2.0, 1, 1])),
    "plain": signals(shortcut_norm=np.zeros(3)),
}
ANGLES = {
    "net": signals(residual_cosine=np.array([-0.5, 0.1, 0.2])),
    "plain": signals(residual_cosine=np.full(3, nan), output_cosine=np.full(3, nan)),
}
SOME = {"a/kernel": np.array([1.0, nan, 3]), "b/kernel": np.array([nan, 2.0, nan])}
COORDINATES = kp.analysis.CoordinateCheck(
    (20, 80), (1, 8), np.ones(2), np.array([[2.0, 3.0], [4.0, 5.0]])
)
SPECTRUM = Spectrum(np.array([8.0, 4.0, 0.5, 1e-9, 0.0]), (5, 5), exact=True)
SPECTRA = kp.analysis.WeightSpectra(
    ("a/kernel", "b/kernel", "c/kernel"),
    ("a", "b", "c"),
    ((9, 4), (4, 4), (4, 1)),
    *np.array([[4.0, 2, 0], [1.0, 0, 0], [6.0, 2, 0]]),
    left_out=(),
)
LESIONS_OF = np.array([0.5, 0.25, 0.75]), 0.125
LESIONS = Lesions(UNITS, ((0,), (1,), (0, 1)), *LESIONS_OF)
VARIANCES = (0.5, 1.0, 2.0)
RUNS = {
    "a": {"loss": [2.0, 1.0, 0.1], "accuracy": [0] * 3, "val_accuracy": [0.25, nan, 0.75]},
    "b": {"loss": [2.0, 1.5], "accuracy": [0.1, 0.2], "val_accuracy": [0.75, 0.625]},
}


def of_each(*fields):
    return [{name: getattr(net, field) for name, net in NETS.items()} for field in fields]


#: What draws a figure, and the values of each panel's lines.
LINES = {
    "gradient norms": (lambda: figures.gradient_norms(NETS), of_each("gradient_norm")),
    "activation norms": (lambda: figures.activation_norms(NETS), of_each("x_norm")),
    "truncation": (lambda: figures.truncation(NETS), of_each("cut", "dead")),
    "alignment": (
        lambda: figures.alignment(ANGLES),
        [
            {"net": [-0.5, 0.1, 0.2], "plain": [nan] * 3},
            {"net": ANGLES["net"].output_cosine, "plain": [nan] * 3},
        ],
    ),
    "ratio": (lambda: figures.residual_ratio(RATIO), [{"net": [0.5, 1, 3], "plain": [nan] * 3}]),
    "weight gradients": (
        lambda: figures.weight_gradients(NETS),
        [{CONV: net.weight_gradients[CONV]} for net in NETS.values()],
    ),
    "weights that some units lack": (
        lambda: figures.weight_gradients({"net": signals(weight_gradients=SOME)}),
        [{"a/kernel": [1, 3], "b/kernel": [2]}],
    ),
    "gradient split": (
        lambda: figures.gradient_split(CHECK),
        [
            {"through shortcuts": ROWS[1], "through branches": ROWS[2]},
            {"Eq. 4 (forward)": ROWS[0], "Eq. 5 (backward)": ROWS[3]},
        ],
    ),
    "direct paths": (
        lambda: figures.direct_paths({"net": PATH}),
        [{"net": PATH.gain}, {"net": PATH.survival}],
    ),
    "coordinate changes": (
        lambda: figures.coordinate_changes({"a": COORDINATES, "b": COORDINATES}),
        [{"1 update": [2, 4], "8 updates": [3, 5]}] * 2,
    ),
    "composite gains": (
        lambda: figures.composite_gains({"net": GAIN, "plain": PLAIN}),
        [
            {
                **{"net, signals": GAIN.forward, "plain, signals": PLAIN.forward},
                **{"net, gradients": GAIN.backward, "plain, gradients": PLAIN.backward},
            }
        ],
    ),
    "composite gains of units that change the shape": (
        lambda: figures.composite_gains({"net": CHANGING}),
        [{"net, signals": [nan] * 3, "net, gradients": [nan] * 3}],
    ),
    "singular values": (
        lambda: figures.singular_values({"unit": SPECTRUM}),
        [{"unit": SPECTRUM.values}, {}],
    ),
    "spectral norms": (
        lambda: figures.spectral_norms({"a": SPECTRA}),
        [{"a": [4, 2, 0]}, {"a": [2.25, 1, 0]}],
    ),
    "lesions": (lambda: figures.lesion_errors(LESIONS), [{"mean": [12.5, 37.5, 75]}]),
    "single lesions": (
        lambda: figures.lesion_errors(Lesions(UNITS, ((0,), (1,), (2,)), *LESIONS_OF)),
        [{"without the unit": [50, 25, 75], "whole network: 12.5 %": [12.5] * 2}],
    ),
    "training": (
        lambda: figures.training_curves(RUNS, "held-out"),
        [
            {"a, training": [2, 1, 0.1], "b, training": [2, 1.5]},
            {  # errors in percent
                **{"a, training": [100] * 3, "b, training": [90, 80]},
                **{"a, held-out": [75, nan, 25], "b, held-out": [25, 37.5]},
            },
        ],
    ),
    "depth scales": (
        lambda: figures.depth_scales("tanh", VARIANCES, (0.0, 0.1), {"net": 1.1}),
        [
            {
                "bias variance 0": [MeanField("tanh", 0.5).xi, nan, MeanField("tanh", 2.0).xi],
                "bias variance 0.1": [MeanField("tanh", each, 0.1).xi for each in VARIANCES],
                "net": [0, 1],
            }
        ],
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_lines(name):
    draw, panels = LINES[name]
    figure = draw()
    for axes, series in zip(figure.axes, panels, strict=True):
        drawn = labelled(axes)
        assert list(drawn) == list(series)
        for label, values in series.items():
            np.testing.assert_allclose(drawn[label], values, rtol=1e-12)
    layout.check(figure)


def test_a_legend_names_the_lines_whose_looks_differ():
    nets = {f"net {i}": signals(i) for i in range(20)}
    figure = figures.truncation(nets)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(nets)
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_label() in nets]
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20
    layout.check(figure)


def test_composite_gains():
    """One colour per network, dashes for gradients, and a line at the gain of identities."""
    figure = figures.composite_gains({"net": GAIN, "plain": PLAIN})
    axes = figure.axes[0]
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axes.lines}
    net, plain = style.COLOURS[:2]
    assert (looks["net, signals"], looks["net, gradients"]) == ((net, "-"), (net, "--"))
    assert (looks["plain, signals"], looks["plain, gradients"]) == ((plain, "-"), (plain, "--"))
    assert [1, 1] in [line.get_ydata() for line in axes.lines if line.get_label().startswith("_")]
    assert title(axes).endswith("0 to 9 for signals, 0 to 2 for gradients")
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert 0 < low < 0.1 < 9 < high
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["net", "plain", "signals", "gradients"]


@pytest.mark.parametrize("epochs", [1, 300])
def test_training_curves_of_a_run(epochs):
    falling = 0.1 + 0.8 * np.exp(-4 * np.arange(epochs) / epochs)
    table = {"epoch": np.arange(epochs), "loss": 3 * falling, "accuracy": 1 - 0.8 * falling}
    table |= {"val_loss": 4 * falling, "val_accuracy": 1 - falling, "learning_rate": falling}
    figure = figures.training_curves({"digits": table}, "validation")
    loss, error, rate = figure.axes
    drawn = {(axes, line.get_linestyle()): line for axes in figure.axes for line in axes.lines}
    expected = {
        (loss, "--"): 3 * falling,
        (loss, "-"): 4 * falling,
        (error, "--"): 80 * falling,
        (error, "-"): 100 * falling,
        (rate, "-"): falling,
    }
    assert drawn.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(drawn[key].get_xdata(), np.arange(1, epochs + 1))
        np.testing.assert_allclose(drawn[key].get_ydata(), values)
    assert title(error) == f"Lowest validation error: {100 * falling[-1]:.2f} %"
    layout.check(figure)


def test_no_epoch_is_chosen_on_the_test_images():
    figure = figures.training_curves({**RUNS, "plain": {"loss": np.ones(9)}})
    assert title(figure.axes[1]) == "Last test error: 25.00 to 37.50 %"


@pytest.mark.parametrize("value", [0.0, nan, np.inf])
def test_networks_that_died_or_diverged(value):
    """They are drawn, without a warning, which would be an error here."""
    fields = {
        name: np.full_like(each, value)
        for name, each in vars(signals()).items()
        if isinstance(each, np.ndarray) and "cosine" not in name
    }
    nets = {"net": signals(weight_gradients={CONV: np.full(3, value)}, **fields)}
    draws = [figures.gradient_norms, figures.activation_norms, figures.residual_ratio]
    draws += [figures.alignment, figures.weight_gradients]
    for draw in draws:
        layout.check(draw(nets))
    layout.check(figures.direct_paths({"net": DirectPath(UNITS, *np.full((2, 4), nan))}))
    profile = kp.analysis.ChannelProfile(UNITS, np.array([[value] * 3, [1.0, 2.0, 3.0]]))
    for baseline in (None, profile):
        layout.check(figures.channel_heat_map(profile, baseline))


def test_maps():
    size = np.array([[1.0, 2.0, 0.0], [nan, 4.0, 100.0]])
    figure = figures.channel_heat_map(kp.analysis.ChannelProfile(UNITS, size))
    drawn = figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(drawn.mask, [[False, False, True], [True, False, False]])
    np.testing.assert_array_equal(drawn.compressed(), [1, 2, 4, 100])
    layout.check(figure)


def test_difference_of_maps():
    size, other = np.array([[1.0, 2.0, 0.0], [nan, 4.0, 3.0]]), np.array([[3.0, 1.0, 0.0]] * 2)
    profile, baseline = (kp.analysis.ChannelProfile(UNITS, each) for each in (size, other))
    figure = figures.channel_heat_map(profile, baseline)
    picture = figure.axes[0].images[0]
    np.testing.assert_array_equal(picture.get_array().filled(nan), [[-2, 1, 0], [nan, 3, 3]])
    assert (picture.norm.vmin, picture.norm.vmax) == (-3, 3)  # white is no difference
    assert title(figure.axes[0]) == "Difference of the sizes: 60 % of the channels are larger"
    layout.check(figure)
    figures.channel_heat_map(profile, profile)
    with pytest.raises(ValueError, match=r"`baseline` must have .* \(1, 3\) and \(2, 3\)"):
        figures.channel_heat_map(profile, kp.analysis.ChannelProfile(UNITS, other[:1]))


def test_class_maps():
    images, maps = harness.images(2, 6, 8, 3), np.zeros((2, 6, 8))
    maps[1, 2, 3] = 5
    figure = figures.class_maps(images, maps, ["cat", "dog"])
    cat, dog, below_cat, below_dog = figure.axes
    assert (cat.get_title(), dog.get_title()) == ("cat", "dog")
    shown = dog.images[0].get_array()
    assert (shown.min(), shown.max()) == (0, 1)
    np.testing.assert_allclose(shown * np.ptp(images[1]) + images[1].min(), images[1], atol=1e-5)
    for axes, own, largest in ((below_cat, maps[0], 1), (below_dog, maps[1], 5)):
        drawn = axes.images[1]
        np.testing.assert_array_equal(drawn.get_array(), own)
        assert drawn.get_clim() == (0, largest)
    with pytest.raises(ValueError, match="3 titles for 2 images"):
        figures.class_maps(images, maps, "abc")
    with pytest.raises(ValueError, match=r"Received: \(2, 6, 8, 3\) and \(2, 8, 6\)"):
        figures.class_maps(images, maps.swapaxes(1, 2))


#: What the reference's symbols are called in a diagram.
WORDS = {"N": "BN", "A": "ReLU", "+": "+"}

#: Shortcut to the boxes on it, after F and in the gate: Fig. 2, Table 1 and later ones.
BOXES = {
    "identity": ([], [], []),
    "constant_scaling": (["* 0.5"], ["* 0.5"], []),
    "exclusive_gating": (["* (1 - g)"], ["* g"], ["1x1 conv", "sigmoid"]),
    "shortcut_only_gating": (["* (1 - g)"], [], ["1x1 conv", "sigmoid"]),
    "conv1x1": (["1x1 conv"], [], []),
    "dropout": (["dropout 0.5"], [], []),
    "none": ([], [], []),
    "scaled_residual": ([], ["* a"], []),
    "decayed_identity": (["* a_l"], [], []),
    "depth_scaling": ([], ["* a"], []),
    "orthogonal": ([], ["\N{UP TACK} x"], []),
    "hyper_connections": (["* H_res"], ["* h_post"], []),
}


def symbols_to_words(symbols: str, block: str) -> list[str]:
    words = []
    for symbol in symbols.replace("|", " ").split():
        size = KERNELS[block][int(symbol[1:]) - 1] if symbol[0] == "W" else None
        words.append(WORDS.get(symbol[0]) or f"{size}x{size} conv")
    return words


@pytest.mark.parametrize("block", ["single", "basic", "bottleneck"])
@pytest.mark.parametrize("arrangement", FIG_4)
def test_boxes_are_those_of_the_paper_in_order(arrangement, block):
    before, after = FIG_4[arrangement][len(KERNELS[block])].split("+")
    for shortcut, (on_shortcut, on_branch, gate) in BOXES.items():
        parts = figures.diagram(arrangement, shortcut, block)
        assert [box.text for box in parts.branch] == symbols_to_words(before, block) + on_branch
        assert [box.text for box in parts.after_addition] == symbols_to_words(after, block)
        assert [box.text for box in parts.shortcut] == on_shortcut
        assert [box.text for box in parts.gate] == gate
        assert parts.connected == (shortcut != "none")


@pytest.mark.parametrize(
    ("arrangement", "stem", "first", "units", "head"),
    [
        ("original", "N A", "W1 N A W2 N + A", "W1 N A W2 N + A", ""),
        ("full_preactivation", "N A", "W1 N A W2 +", "N A W1 N A W2 +", "N A"),
        ("relu_only_preactivation", "N A", "W1 N A W2 N +", "A W1 N A W2 N +", "A"),
        (kp.arrangements.RAW_ENDS, "", "N A W1 N A W2 +", "N A W1 N A W2 +", ""),
    ],
)
def test_network_diagram(arrangement, stem, first, units, head):
    """The appendix: the stem activates for both paths of the first unit, and one BN-ReLU is
    before the pooling.
    """
    figure = figures.network_diagram(arrangement)
    want = {
        "stem": ["image", "conv1", *symbols_to_words(stem, "basic"), "$x_0$"],
        "first unit": ["$x_0$", *symbols_to_words(first, "basic"), "$x_1$"],
        "other units": ["$x_l$", *symbols_to_words(units, "basic"), "$x_{l+1}$"],
        "head": ["$x_L$", *symbols_to_words(head, "basic"), "pooling", "classifier", "logits"],
    }
    found = {}
    for axes in figure.axes:
        down = sorted(axes.texts, key=lambda text: -text.get_position()[1])
        found[axes.get_title()] = [shown for text in down if (shown := text.get_text())]
        is_straight = not any(np.ptp(line.get_xdata()) for line in axes.lines)
        assert is_straight == (axes.get_title() in ("stem", "head"))
    assert found == want
    layout.check(figure)


def test_wide_figures_have_rows():
    """No figure is too wide to be read on a page, and none has empty axes."""
    for count in (1, 4, 5, 7, 13):
        drawn = {f"unit {i}": figures.diagram("original") for i in range(count)}
        figure = figures.diagrams_figure(drawn)
        assert figure.get_figwidth() < 9.5
        assert [axes.get_title() for axes in figure.axes] == list(drawn)
        layout.check(figure)


def test_no_two_boxes_overlap():
    for figure in (
        figures.shortcuts_figure(),
        figures.arrangements_figure("bottleneck"),
        figures.network_diagram("full_preactivation"),
    ):
        layout.check(figure)
        for axes in figure.axes:
            for one, other in itertools.combinations(axes.patches, 2):
                apart = np.abs(np.subtract(one.get_bbox().p0, other.get_bbox().p0))
                assert (apart >= (one.get_width(), one.get_height())).any()


def test_training_health():
    table = {
        "step": [10.0, 20.0],
        "gradient_norm": [1.0, 2.0],
        "layer_gradient_ratio": [3.0, nan],
        **{"gradient_norm/a/kernel": [1.0, 2.0], "gradient_norm/b/kernel": [4.0, 4.0]},
        **{"weight_norm/a/kernel": [10.0, 10.0], "weight_norm/b/kernel": [2.0, 0.0]},
        **{"update_norm/a/kernel": [0.1, 0.2], "update_norm/b/kernel": [0.1, 0.3]},
        **{f"{name}_norm/b/gamma": [1e6, 1e6] for name in ("gradient", "weight", "update")},
        "activation_mean/a/kernel": [-0.1, -20.0],
    }
    figure = figures.training_health({name: np.array(values) for name, values in table.items()})
    drawn = {title(axes).lower(): labelled(axes) for axes in figure.axes if axes.get_visible()}
    panels = {key: drawn.get(row.figure.lower()) for key, row in HEALTHY_RANGES.items()}
    assert panels["gradient_norm"]["network"].tolist() == [1, 2]
    for label, values in (("least", [0.1, 0.2]), ("median", [1.05, 0.2]), ("largest", [2, 0.2])):
        np.testing.assert_allclose(panels["gradient_weight_ratio"][label], values)
    np.testing.assert_allclose(panels["update_ratio"]["largest"], [0.05, 0.02])
    layout.check(figure)


def test_path_lengths():
    shares = kp.analysis.path_lengths(10)
    figure = figures.path_length_shares(shares)
    assert [bar.get_height() for bar in figure.axes[0].patches] == shares.tolist()
    layout.check(figure)


@pytest.mark.parametrize("units", [1, 18, 100])
def test_logit_contributions(units):
    rows = np.random.default_rng(0).normal(size=(units + 2, 4))
    names = tuple(f"stage3_unit{i}" for i in range(1, units + 1))
    parts = (np.arange(4), rows[0], rows[1:-1], rows[-1], rows.sum(axis=0))
    figure = figures.logit_contributions(Contributions(names, *parts))
    axes = figure.axes[0]
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], rows.mean(axis=1))
    points = axes.collections[0].get_offsets().reshape(units + 2, 4, 2)
    np.testing.assert_allclose(points[..., 1], rows)
    np.testing.assert_array_equal(points[:, 0, 0], np.arange(units + 2))
    best = names[rows[1:-1].mean(axis=1).argmax()]
    assert title(axes).startswith(f"{best} adds most to the logit: ")
    layout.check(figure)


def test_no_global_state():
    """pyplot knows of no figure, and no setting has changed."""
    import matplotlib
    from matplotlib import pyplot

    before = dict(matplotlib.rcParams)
    style.svg(figures.training_curves(RUNS))
    assert not pyplot.get_fignums()
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib(monkeypatch):
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'keras-preact\[training\]'"):
        figures.gradient_norms({"a": signals()})


def test_every_colour_is_known_on_dark_pages():
    swiglu = figures.unit_diagram("post_norm", block="swiglu")
    for figure in (figures.gradient_split(CHECK), figures.shortcuts_figure(), swiglu):
        colours = re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", style.svg(figure))
        assert {colour.upper() for colour in colours} <= {colour.upper() for colour in style.DARK}
