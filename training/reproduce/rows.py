"""The tables of the results: each row with its trial and its published number."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import keras_preact as kp

from ..config import Model
from ..errors import UserError, lookup
from ..functions import find_object, is_own
from .trials import RECIPES, Trial


@dataclasses.dataclass(frozen=True)
class Row:
    """A trial with its published result, if there is one, and the name of the trial that
    it is compared with.
    """

    label: str
    trial: Trial
    published: kp.published.Result | None = None
    baseline: str | None = None


def _row(
    label: str,
    name: str,
    recipe: str,
    model: Model,
    baseline: str | None = None,
    published: kp.published.Result | None = None,
    **more: Any,
) -> Row:
    """Return a row of a trial that no published table trains."""
    return Row(label, Trial(name, recipe, model, **more), published, baseline)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the report.

    Args:
        title: What it shows.
        rows: In the paper's order.
        about: What is trained, and how the runs differ from the paper's.
        unlike: How the setting of the published numbers differs, for the heading of their
            column.
        short: Whether the schedule is shorter than the paper's: the report then shows the
            training loss as well.
        baseline: Name of the row that the others are compared with.
    """

    title: str
    rows: tuple[Row, ...]
    about: str = ""
    unlike: str = ""
    short: bool = False
    baseline: str = "the original"


#: Layers of the shallowest network for CIFAR with a registered name, as in the papers.
SHALLOWEST = 20


def _trial(
    arguments: Mapping[str, Any], recipe: str, dataset: str, more: Mapping[str, Any]
) -> Trial:
    """Return the trial of a published row. The arguments of `kp.models.resnet_cifar`
    become options of --model, together with `more`, and parts of the trial's name.
    """
    depth = arguments["depth"]
    options = {key: value for key, value in arguments.items() if key not in ("depth", "classes")}
    parts = [f"resnet{depth}"]
    for key, value in list(options.items()):
        if isinstance(value, Mapping):  # constant scaling with its factors
            scales = (value["config"]["shortcut"], value["config"]["residual"])
            options |= {"shortcut": "constant_scaling", "scales": scales}
            parts += ["constant_scaling", *(f"{scale:g}" for scale in scales)]
        else:
            parts.append(f"b{value:g}" if key == "gate_bias" else value)
    if recipe in ("batch64", "eighth"):
        parts.append(recipe)
    named = max(depth, SHALLOWEST)
    by_depth = () if depth == named else (f"depth={depth}",)
    model = Model(f"cifar_resnet{named}_original", options=by_depth, **options, **more)
    return Trial(f"{dataset}/{'-'.join(parts)}", recipe, model)


def _table(
    title: str,
    recipe: str = "paper",
    *,
    baseline: str | None = None,
    depth: int | None = None,
    small: Mapping[str, Any] | None = None,
    about: str = "",
    unlike: str = "",
    **of: str,
) -> Table:
    """Return a table of published rows.

    Args:
        title, about, unlike: See `Table`.
        recipe: Name in `RECIPES`.
        baseline: Published row that the others of its network are compared with.
        depth: Layers in place of the published ones.
        small: More arguments of the builder, for networks on digits.
        **of: Arguments of `kp.published.results`, which select the rows.
    """
    trials = {}
    for result in kp.published.results(**of):
        arguments = {**result.arguments, **({"depth": depth} if depth else {})}
        dataset = "digits" if small else result.dataset
        trials[result] = _trial(arguments, recipe, dataset, small or {})
    baselines = {
        (result.dataset, result.network): trial.name
        for result, trial in trials.items()
        if result.row == baseline
    }
    rows = []
    for result, trial in trials.items():
        data = "CIFAR-100, " if result.dataset == "cifar100" else ""
        network = f"ResNet-{depth}" if depth else result.network
        other = baselines.get((result.dataset, result.network))
        other = None if other == trial.name else other
        rows.append(Row(f"{data}{network}, {result.row}", trial, result, other))
    return Table(title, tuple(rows), about, unlike, short=recipe in ("eighth", "small"))


#: The paper's rows that the others are compared with.
IDENTITY, ORIGINAL = "identity (1, 1)", "original"
#: What makes the networks of the paper small: 4, 8, 16 channels, for images of 8 x 8 pixels.
_SMALL: Mapping[str, Any] = {
    "recipe": "small",
    "small": {"width_factor": 0.25},
    "about": "A quarter of the channels, 8 x 8 digits, and the paper's schedule in 700 iterations.",
    "unlike": "CIFAR-10",
}
#: Start of the names of the tables with an eighth of the schedule to the layers of their
#: networks, in place of 110.
_SHALLOWER = {"eighth": 56, "eighth_20_": 20, "eighth_8_": 8}


def _eighth(number: str, depth: int, baseline: str) -> Table:
    """Return a published table with fewer layers and an eighth of the schedule."""
    return _table(
        f"Table {number} with ResNet-{depth} and an eighth of the schedule",
        "eighth",
        baseline=baseline,
        depth=depth,
        about=f"ResNet-{depth} in place of ResNet-110, and an eighth of the paper's schedule: "
        "8,000 iterations.",
        unlike="ResNet-110, 64,000 iterations",
        table=number,
        network="ResNet-110",
    )


_FAST = Table(
    "CIFAR-10 in minutes",
    (
        _row(
            "cifar_fast_resnet8",
            "cifar10/fast_resnet8",
            "fast",
            Model("cifar_fast_resnet8"),
            measurements=0,
            views=("one", "flip_shift"),
        ),
    ),
    about="A wide, shallow pre-activation network, trained by the recipe `cifar10_fast`. Its "
    "settings were chosen on held-out training images; the test images are measured once, after "
    "the last iteration. The 6 views of an image are the image, the image moved by a pixel in two "
    "directions, and the mirror images of these three. Their logits are averaged; the unmoved "
    "image and its mirror image have double weight.",
)

#: Pre-activation at the depths of the first paper, which neither paper trained.
_PREACT = Table(
    "Full pre-activation at 20 to 56 layers, on CIFAR-10",
    tuple(
        _row(
            f"ResNet-{depth}, full_preactivation",
            f"cifar10/resnet{depth}-full_preactivation",
            "paper",
            Model(f"cifar_resnet{depth}_preact"),
            baseline=f"cifar10/resnet{depth}-original",
        )
        for depth in (20, 32, 44, 56)
    ),
)

#: The paper's recipe is not for these networks, nor did the paper train the deepest one. The
#: published errors are those of the same networks with all channels, on CIFAR-10.
_DEEP = Table(
    "A thousand and ten thousand layers, on digits",
    tuple(
        _row(
            label,
            f"digits/resnet{name}",
            "small",
            Model(model, width_factor=0.25),
            baseline,
            published,
            measurements=20,
        )
        for (label, name, model, baseline), published in zip(
            (
                ("ResNet-1001, original", "1001-original", "cifar_resnet1001_original", None),
                (
                    "ResNet-1001, full_preactivation",
                    "1001-full_preactivation",
                    "cifar_resnet1001_preact",
                    "digits/resnet1001-original",
                ),
                (
                    "ResNet-10001, full_preactivation, DepthScaledHe",
                    "10001-full_preactivation",
                    "digits_resnet10001_preact",
                    None,
                ),
            ),
            (*kp.published.results("3", "ResNet-1001", "cifar10"), None),
            strict=True,
        )
    ),
    about="A quarter of the channels and the recipe of the small tables. With 10,001 layers the "
    "weights are scaled for the depth: the last weight of each branch by 1 / sqrt(3,333), for "
    "3,333 units.",
    unlike="CIFAR-10",
)


def _chain(layers: int) -> Model:
    return Model("digits_vanilla10000", options=(f"depth={layers}",))


_PLAIN = Table(
    "Chains without shortcuts and normalisation, on digits",
    tuple(
        _row(label, f"digits/{name}", recipe, model, measurements=20)
        for label, name, recipe, model in (
            ("1,000 layers, SGD", "plain1000-sgd", "plain_sgd", _chain(1_000)),
            ("1,000 layers, Muon", "plain1000-muon", "plain_muon", _chain(1_000)),
            ("10,000 layers, Muon", "plain10000-muon", "plain_muon10000", _chain(10_000)),
            (
                "ResNet-1001, full_preactivation, Muon",
                "resnet1001-full_preactivation-muon",
                "residual_muon",
                Model("cifar_resnet1001_preact", width_factor=0.25),
            ),
        )
    ),
    about="A chain of convolutions with 16 channels and tanh. The weights start as orthogonal "
    "matrices, which keep the signal (delta-orthogonal, arXiv 1806.05393), and there are no "
    "biases. The rate of SGD is the best of 0.03, 0.003, 0.001 and 0.0003; that of Muon, whose "
    "updates are orthogonal too, is 0.1 / layers. Both were chosen by trial on 360 digits, some "
    "of which are test images. For comparison, the last row has the residual network of the table "
    "above; its rate, 0.02, is the best of 0.06, 0.02 and 0.003 on held-out images.",
)


#: Label, end of the trial's name, and options of --model of each row of the tables of shortcuts.
_TEN_YEARS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("identity", "identity", {"shortcut": "identity"}),
    (
        "constant scaling (0.5, 0.5)",
        "scaling",
        {"shortcut": "constant_scaling", "scales": (0.5, 0.5)},
    ),
    (
        "exclusive gating, b_g = -6",
        "exclusive",
        {"shortcut": "exclusive_gating", "gate_bias": -6.0},
    ),
    (
        "shortcut-only gating, b_g = -6",
        "gating",
        {"shortcut": "shortcut_only_gating", "gate_bias": -6.0},
    ),
    ("1x1 convolution", "conv1x1", {"shortcut": "conv1x1"}),
    ("dropout 0.5", "dropout", {"shortcut": "dropout"}),
    ("none", "none", {"shortcut": "none"}),
    ("scaled residual, 0 (SkipInit, ReZero)", "skip_init", {"shortcut": "scaled_residual"}),
    (
        "scaled residual, 1e-6 per channel (LayerScale)",
        "layer_scale",
        {"shortcut": "scaled_residual", "shortcut_options": ("initial=1e-6", "per_channel=true")},
    ),
    ("orthogonal, over channels", "orthogonal", {"shortcut": "orthogonal"}),
    (
        "orthogonal, over the map",
        "orthogonal-map",
        {"shortcut": "orthogonal", "shortcut_options": ("over=map",)},
    ),
    ("decayed identity, 1 to 0.6", "decayed", {"shortcut": "decayed_identity"}),
    (
        "depth scaling, power 0.5",
        "depth_scaling",
        {"shortcut": "depth_scaling", "shortcut_options": ("power=0.5",)},
    ),
    *(
        (
            f"hyper-connections, {about}",
            f"hyper-{constraint}",
            {"shortcut": "hyper_connections", "shortcut_options": (f"constraint={constraint}",)},
        )
        for constraint, about in (
            ("none", "free"),
            ("sinkhorn", "Sinkhorn (mHC)"),
            ("permutations", "permutations (mHC-lite)"),
        )
    ),
)


def _ten_years(where: str, trial: str, recipe: str, about: str, model: Model, **more: Any) -> Table:
    """Return the table of shortcuts for a network.

    Args:
        where: End of the title.
        trial: Pattern of the names of its trials.
        recipe: Name in `RECIPES`.
        about: Network, data and recipe in words.
        model: The network with identity shortcuts.
        **more: Arguments of `Trial`.
    """
    return Table(
        f"Ten years of shortcuts, {where}",
        tuple(
            _row(
                label,
                trial.format(part),
                recipe,
                dataclasses.replace(model, **options),
                baseline=None if part == "identity" else trial.format("identity"),
                signals=True,
                **more,
            )
            for label, part, options in _TEN_YEARS
        ),
        about=f"Shortcuts of the paper and of 2017 to 2026 in one network: {about}. Most of the "
        "later ones were published for transformers and AdamW, which this table does not test. "
        "The composite gain is that of the product of all shortcuts from x_l to the end of its "
        "stage, at the l where it differs most from 1: above 1, the shortcuts can enlarge a signal "
        "(forward) or a gradient (backward). The cosine is the angle between what the shortcut and "
        "what the branch add, the median over the units. Both are measured after the training, in "
        "inference, where dropout changes nothing.",
        short=True,
        baseline="the identity",
    )


_DIGITS2 = _table("Table 2 scaled down, on digits", baseline=ORIGINAL, table="2", **_SMALL)


#: First part of a trial's name to its network in the table of advice.
_ADVISED = {
    "resnet20-preact": Model("cifar_resnet20_preact", width_factor=0.25),
    "resnet20-wide": Model("cifar_resnet20_preact"),
    "resnet20-original": Model("cifar_resnet20_original", width_factor=0.25),
    "resnet56-original": Model("cifar_resnet56_original", width_factor=0.25),
    "resnet110-preact": Model("cifar_resnet110_preact", width_factor=0.25),
    "transformer6": Model("digits_transformer6_preln"),
}
#: The network of the small tables that the rows with 110 layers are compared with.
_RESNET110 = "resnet110-full_preactivation"
_BETWEEN = "dropout_at=between_weights"
#: Label, end of the trial's name, its baseline's name if it has one, recipe, and options of
#: --model of each row.
_ADVICE: tuple[tuple[str, str, str | None, str, Mapping[str, Any]], ...] = (
    ("ResNet-20", "resnet20-preact", None, "small", {}),
    ("GELU", "resnet20-preact-gelu", "resnet20-preact", "small", {"activation": "gelu"}),
    ("SiLU", "resnet20-preact-silu", "resnet20-preact", "small", {"activation": "silu"}),
    (
        "hard SiLU",
        "resnet20-preact-hard_silu",
        "resnet20-preact",
        "small",
        {"activation": "hard_silu"},
    ),
    (
        "dropout 0.1 between the weights",
        "resnet20-preact-dropout_between",
        "resnet20-preact",
        "small",
        {"dropout": 0.1, "options": (_BETWEEN,)},
    ),
    (
        "dropout from 0.1 to 0 in the first half",
        "resnet20-preact-dropout_early",
        "resnet20-preact-dropout_between",
        "small_early_dropout",
        {"dropout": 0.1, "options": (_BETWEEN, "dropout_varies=true")},
    ),
    (
        "dropout 0.1 before the addition",
        "resnet20-preact-dropout_addition",
        "resnet20-preact",
        "small",
        {"dropout": 0.1, "options": ("dropout_at=before_addition",)},
    ),
    (
        "dropout 0.1 on the shortcuts",
        "resnet20-preact-dropout_shortcut",
        "resnet20-preact",
        "small",
        {"shortcut": "dropout", "shortcut_options": ("rate=0.1",)},
    ),
    ("full width, batch 4", "resnet20-wide-batch4", None, "small_batch4", {}),
    (
        "full width, batch 4, layer normalisation",
        "resnet20-wide-batch4-layer",
        "resnet20-wide-batch4",
        "small_batch4",
        {"normalization": "layer"},
    ),
    (
        "full width, batch 4, group normalisation",
        "resnet20-wide-batch4-group",
        "resnet20-wide-batch4",
        "small_batch4",
        {"normalization": "group"},
    ),
    ("batch 128, rate 0.2", "resnet20-preact-batch128", None, "small_batch128", {}),
    (
        "batch 128, rate 0.1",
        "resnet20-preact-batch128-same",
        "resnet20-preact-batch128",
        "small_batch128_same",
        {},
    ),
    (
        "batch 128, rate 0.4",
        "resnet20-preact-batch128-linear",
        "resnet20-preact-batch128",
        "small_batch128_linear",
        {},
    ),
    ("ResNet-110", _RESNET110, None, "small", {}),
    ("ResNet-110 without warm-up", "resnet110-preact-cold", _RESNET110, "small_cold", {}),
    (
        "ResNet-110, orthogonal weights",
        "resnet110-preact-orthogonal_weights",
        _RESNET110,
        "small",
        {"options": ("kernel_initializer=orthogonal",)},
    ),
    (
        "ResNet-20, original, without shortcuts",
        "resnet20-original-none",
        None,
        "small",
        {"shortcut": "none"},
    ),
    (
        "ResNet-56, original, without shortcuts",
        "resnet56-original-none",
        None,
        "small",
        {"shortcut": "none"},
    ),
    (
        "transformer, ReLU",
        "transformer6-relu",
        None,
        "small_adamw",
        {"options": ("mlp=relu",)},
    ),
    (
        "transformer, GELU",
        "transformer6-gelu",
        "transformer6-relu",
        "small_adamw",
        {"options": ("mlp=gelu",)},
    ),
    (
        "transformer, SwiGLU",
        "transformer6-swiglu",
        "transformer6-relu",
        "small_adamw",
        {"options": ("mlp=swiglu",)},
    ),
)


def _advice(label: str, name: str, baseline: str | None, recipe: str, options: Any) -> Row:
    for row in _DIGITS2.rows:
        if row.trial.name == f"digits/{name}":
            return Row(label, row.trial)
    model = next(model for start, model in _ADVISED.items() if name.startswith(start))
    model = dataclasses.replace(model, **options)
    of = baseline and f"digits/{baseline}"
    return _row(label, f"digits/{name}", recipe, model, of, measurements=20)


#: Name of a command to its table, in the order of the report.
TABLES: Mapping[str, Table] = {
    "fast": _FAST,
    "first_paper": _table(
        "Table 6 of arXiv 1512.03385: depth, on CIFAR-10", table="6 of 1512.03385"
    ),
    "preact": _PREACT,
    "table1": _table("Table 1: shortcuts, on CIFAR-10", baseline=IDENTITY, table="1"),
    "table2": _table("Table 2: activations, on CIFAR-10", baseline=ORIGINAL, table="2"),
    "table3": _table("Table 3: pre-activation against the original", baseline=ORIGINAL, table="3"),
    "table4": _table("Table 4: ResNet-1001 with batches of 64", "batch64", table="4"),
    **{
        f"{name}{number}": _eighth(number, depth, baseline)
        for name, depth in _SHALLOWER.items()
        for number, baseline in (("1", IDENTITY), ("2", ORIGINAL))
    },
    "digits1": _table("Table 1 scaled down, on digits", baseline=IDENTITY, table="1", **_SMALL),
    "digits2": _DIGITS2,
    "shortcuts": _ten_years(
        "on digits",
        "digits/resnet110-preact-{}",
        "small",
        "ResNet-110 with full pre-activation and a quarter of the channels, on 8 x 8 digits, with "
        "the recipe of the small tables",
        Model("cifar_resnet110_preact", width_factor=0.25),
        measurements=20,
    ),
    "shortcuts_eighth": _ten_years(
        "with ResNet-56 and an eighth of the schedule, on CIFAR-10",
        "cifar10/resnet56-preact-{}-eighth",
        "eighth",
        "ResNet-56 with full pre-activation, and an eighth of the paper's schedule: 8,000 "
        "iterations",
        Model("cifar_resnet56_preact"),
    ),
    "advice": Table(
        "Activations, dropout, weights, warm-up and batches, on digits",
        tuple(_advice(*row) for row in _ADVICE),
        about="What handbooks advise: one change at a time, in networks of a quarter of the "
        "channels. The first rows are ResNet-20 with full pre-activation and the recipe of the "
        "small tables. Batches of 4 and 128 train for as many epochs. For 128 images, a rate of "
        "0.2 is that of 32 images times the square root of 4; 0.4 is in proportion. The "
        "transformers have 6 layers, and train with AdamW for twice as long.",
        short=True,
        baseline="the row without the change",
    ),
    "deep": _DEEP,
    "plain": _PLAIN,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Published tables with what was measured beside each of their rows.

    Args:
        title: What they compare.
        published: Names of published tables, as in `kp.published`.
        columns: Heading to the names of the tables that were measured in this setting, the
            paper's setting first.
        about: How the settings differ.
    """

    title: str
    published: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]
    about: str = ""

    def results(self) -> list[kp.published.Result]:
        """Return the published rows."""
        return [row for name in self.published for row in kp.published.results(table=name)]

    def has(self, table: str) -> bool:
        """Whether a table of a column is about these published rows, or about none."""
        first = TABLES[table].rows[0].published
        return table not in OWN and (first is None or first.table in self.published)

    def beside(self, result: kp.published.Result, heading: str) -> list[Row]:
        """Return the rows of a column that belong to a published row: those of its trial, else
        those of its network in other tables, or those that are compared with its trial.
        """
        rows = [row for name in self.columns[heading] for row in TABLES[name].rows]
        if own := [row for row in rows if row.published is result]:
            return own
        first = next(iter(self.columns))
        trials = [] if heading == first else [row.trial.name for row in self.beside(result, first)]
        return [
            row
            for row in rows
            if (
                row.baseline in trials
                if row.published is None
                else row.published.table not in self.published
                and (row.published.dataset, row.published.arguments)
                == (result.dataset, result.arguments)
            )
        ]


def _settings(number: str) -> dict[str, tuple[str, ...]]:
    return {
        "as in the paper": (f"table{number}",),
        **{
            f"ResNet-{depth}, an eighth of the schedule": (f"{name}{number}",)
            for name, depth in _SHALLOWER.items()
        },
        "digits, a quarter of the channels": (f"digits{number}",),
    }


#: The published rows, part by part.
PAPER = (
    Part(
        "Shortcuts (Table 1)",
        ("1",),
        _settings("1"),
        "ResNet-110 with original units on CIFAR-10. Rows are compared with the identity.",
    ),
    Part(
        "Where BN and ReLU are (Table 2)",
        ("2",),
        _settings("2"),
        "CIFAR-10. Rows are compared with the original units of the same depth.",
    ),
    Part(
        "Pre-activation in deeper networks (Tables 3 and 4)",
        ("3", "4"),
        {
            "as in the paper": ("table3", "table4"),
            "digits, a quarter of the channels": ("digits2", "deep"),
        },
        "CIFAR-10 if nothing else is said. Full pre-activation is compared with the original units "
        "of the same depth. Table 4 has one more row, with batches of 64. Numbers on digits are "
        "those of Table 2 and of "
        "[1,001 layers](#a-thousand-and-ten-thousand-layers-on-digits).",
    ),
    Part(
        "ImageNet (Table 5)",
        ("5",),
        {"as in the paper": ()},
        "Top-1 and top-5 error of a single crop. [The recipe](../docs/howto/imagenet.md) is there; "
        "it needs the images and several GPUs.",
    ),
    Part(
        "20 to 110 layers (Table 6 of the first paper)",
        ("6 of 1512.03385",),
        {"as in the paper": ("first_paper",), "full pre-activation instead": ("preact",)},
        "The first paper, arXiv 1512.03385, has original units on CIFAR-10. Neither paper has "
        "pre-activation at 20 to 56 layers: here it is trained by the same recipe, and compared "
        "with the original units of the same depth.",
    ),
)
#: The tables that have a section of their own.
OWN = ("fast", "shortcuts", "shortcuts_eighth", "advice", "deep", "plain")


def trials(table: Table) -> dict[str, Trial]:
    """Return the trials of a table by name, each once."""
    return {row.trial.name: row.trial for row in table.rows}


def table(name: str) -> Table:
    """Return the table of this name, or a table of a person, MODULE:TABLE.

    Raises:
        UserError: for an object that is no table, or a trial whose name is no place for
            results.
    """
    if not is_own(name):
        return TABLES[name]
    own = find_object(name, "TABLE", "my_tables:WIDTHS")
    rows = getattr(own, "rows", ())
    # not by its class: a checkout has this module under two names
    if not rows or not all(hasattr(row, "trial") for row in rows):
        raise UserError(f"{name} must be a Table with rows. Received: {own!r:.200}")
    for row in rows:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", row.trial.name):
            raise UserError(
                f"The name of a trial in {name} must be FOLDER/NAME, such as mine/wide. Received: "
                f"{row.trial.name!r}"
            )
        if not is_own(row.trial.recipe):
            lookup(RECIPES, row.trial.recipe, f"recipe in {name}")
    return own


#: Name to trial, each once.
TRIALS: Mapping[str, Trial] = {
    name: trial for table in TABLES.values() for name, trial in trials(table).items()
}
