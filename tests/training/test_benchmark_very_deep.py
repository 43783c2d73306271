"""The command that trains very deep networks, on shallow ones: what it prints and
writes, and its mistakes.
"""

import json

import keras
import numpy as np
import pytest

from tests.training.commands import error_of
from training.benchmark import __main__ as benchmark
from training.benchmark import very_deep


def run(*arguments):
    benchmark.main(["very-deep", *map(str, arguments)])


#: The two differ in the weights that they start from alone. Torch, which compiles nothing, shows it
#: soonest.
OTHERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            keras.backend.backend() != "torch", reason="nothing of it depends on the backend"
        ),
    )
    for name in very_deep.NETWORKS
    if name != "vanilla"
]


@pytest.mark.parametrize("network", ["vanilla", *OTHERS])
def test_run(network, tmp_path, capsys):
    layers = 10 if network == "vanilla" else 29
    options = ("--layers", layers, "--width", 0.25, "--batch", 8, "--steps", 3, "--remat", 2)
    run(network, *options, "--output", tmp_path / "result.json")
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    losses = result["losses"]
    assert f"step 3: loss {losses[2]:.4f}" in printed
    assert losses[2] < losses[0]
    assert len(losses) == 3
    assert str(layers) in result["name"]
    gradients = result["gradient_norms"]
    assert {
        "stem_conv/kernel",
        "stage1_units/branch/conv_1/kernel",
        "head_classifier/kernel",
    } <= gradients.keys()
    assert np.isfinite(list(gradients.values())).all()
    assert all(norm > 0 for norms in gradients.values() for norm in norms)
    assert 1e8 < result["peak_resident_bytes"] < 1e11


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("preact", "--layers", 100), "the nearest are 92 and 101"),
        (("vanilla", "--steps", 0), "must be positive"),
    ],
    ids=["depth", "steps"],
)
def test_mistakes(capsys, options, part):
    assert part in error_of(capsys, run, *options)
