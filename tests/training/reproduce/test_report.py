"""The report agrees with the results: numbers by hand, words for few runs and for diverged
runs, no mixed rows.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from tests.training.reproduce.records import record, write
from training.errors import UserError
from training.reproduce import pictures, results
from training.reproduce.report import report
from training.reproduce.rows import TABLES, TRIALS

FULL, ORIGINAL = "cifar10/resnet110-full_preactivation", "cifar10/resnet110-original"
DROPOUT = "ResNet-110, dropout (dropout 0.5, 1)"
SMALL_FULL, SMALL_ORIGINAL = "digits/resnet110-full_preactivation", "digits/resnet110-original"


def section(folder: Path, table: str) -> str:
    """Write the report, and return its section about a table."""
    report(folder)
    parts = re.split(r"^## (.*)\n", (folder / "README.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[TABLES[table].title]


def rows(text: str) -> dict[str, dict[str, str]]:
    """Return the rows of a Markdown table: label to heading to cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_devices_and_lengths_are_not_averaged(tmp_path):
    for seed, (device, error, errors) in enumerate(
        [
            ("CPU", 6.0, [9.0, 6.0]),
            ("CPU", 6.2, [9.0, 6.2]),
            ("CPU", None, [9.0, None]),  # it counts with the others on its device
            ("CPU", 5.0, [9.0, 7.0, 5.0]),
            ("NVIDIA H200", 7.0, [9.0, 7.0]),
        ]
    ):
        results.write(tmp_path, record(FULL, seed, error, errors=errors, device=device))
    write(tmp_path, ORIGINAL, [8.0], device="NVIDIA H200")
    found = rows(section(tmp_path, "table2"))
    name = "ResNet-110, full_preactivation, on"
    assert {label: (row["test error"], row["n"]) for label, row in found.items()} == {
        "ResNet-110, original": ("8.00", "1"),
        f"{name} CPU, 20 iterations": ("6.20 (6.00 to diverged)", "3"),
        f"{name} CPU, 30 iterations": ("5.00", "1"),
        f"{name} NVIDIA H200": ("7.00", "1"),
    }


def test_row(tmp_path):
    write(tmp_path, FULL, [6.9, 6.1, 6.4, 6.2, 6.9], seconds=7200.0, together=2)
    found = section(tmp_path, "table2")
    own = rows(found)["ResNet-110, full_preactivation"]
    assert own == {
        **{"row": "ResNet-110, full_preactivation", "published": "6.37"},
        **{"test error": "6.40 (6.10 to 6.90)", "n": "5", "time per run": "1 h 0 min"},
    }
    assert "Made by: 5 runs on NVIDIA H200 in float32, 5 h 0 min in all." in found
    # the same trial in another table, beside another row
    assert rows(section(tmp_path, "table3"))["ResNet-110, full_preactivation"] == own


def test_signals(tmp_path):
    """Medians of the runs that have them; a run that diverged has none."""
    row = "digits/resnet110-preact-{}".format
    for seed, (gain, cosine) in enumerate([(4.0, -0.5), (2.0, 0.25), (1.0, 0.5)]):
        signals = {"forward": gain, "backward": 10 * gain, "cosine": cosine}
        results.write(tmp_path, record(row("hyper-none"), seed, 5.0, signals=signals))
    results.write(tmp_path, record(row("hyper-none"), 3, None))
    signals = {"forward": None, "backward": None, "cosine": 0.125}
    results.write(tmp_path, record(row("conv1x1"), 0, 5.0, signals=signals))
    results.write(tmp_path, record(row("none"), 0, None))
    found = rows(section(tmp_path, "shortcuts"))
    names = ("composite gain, forward / backward", "cosine")
    assert {label: tuple(cells[name] for name in names) for label, cells in found.items()} == {
        "1x1 convolution": ("-", "0.12"),
        "none": ("-", "-"),
        "hyper-connections, free": ("2 / 20", "0.25"),
    }


def test_diverged_runs(tmp_path):
    write(tmp_path, FULL, [6.2, None, 6.3])
    write(tmp_path, ORIGINAL, [6.2, None])
    write(tmp_path, "cifar10/resnet110-bn_after_addition", [None])
    own = [cells["test error"] for cells in rows(section(tmp_path, "table2")).values()]
    assert own == ["diverged (6.20 to diverged)", "diverged", "6.30 (6.20 to diverged)"]


def test_views_of_the_test_images(tmp_path):
    views = {"one": {"accuracy": 0.93}, "flip_shift": {"accuracy": 0.94}}
    run = record("cifar10/fast_resnet8", 0, 7.0)
    results.write(tmp_path, dataclasses.replace(run, views=views))
    own = rows(section(tmp_path, "fast"))["cifar_fast_resnet8"]
    assert (own["test error"], own["test error, 6 views"]) == ("7.00", "6.00")


def test_against_the_original(tmp_path):
    """The paper's errors are: full pre-activation 6.37, original 6.61, ReLU-only
    pre-activation 6.71, ReLU before addition 7.84, BN after addition 8.17.
    """
    name = "cifar10/resnet110-{}".format
    write(tmp_path, name("original"), [9.3, 9.4, 9.5, 9.6])
    write(tmp_path, name("full_preactivation"), [6.3, 6.4, 6.5, 6.6])
    write(tmp_path, name("relu_only_preactivation"), [7.1, 7.2, 7.3, 7.4])
    write(tmp_path, name("relu_before_addition"), [12.0, 12.1, 12.2, 12.3])
    write(tmp_path, name("bn_after_addition"), [9.4])
    write(tmp_path, "cifar10/resnet164-full_preactivation", [5.4, 5.5, 5.6])
    text = section(tmp_path, "table2")
    assert "\n7 of 10 pairs of rows have the published order: " in text
    assert "as published for 5 pairs, opposite for 1, and open for 4." in text
    assert "\n- ResNet-110, original > ResNet-110, relu_only_preactivation\n" in text
    found = rows(text)
    assert {label: own["against the original"] for label, own in found.items()} == {
        "ResNet-110, original": "-",
        "ResNet-110, full_preactivation": "lower, as published",
        "ResNet-110, relu_only_preactivation": "lower, unlike published",
        "ResNet-110, relu_before_addition": "higher, as published",
        "ResNet-110, bn_after_addition": "open",  # one run
        "ResNet-164, full_preactivation": "-",  # the original was not measured
    }
    # nothing is published for these, and the original is in another table
    write(tmp_path, "cifar10/resnet20-original", [8.6, 8.7, 8.8, 8.9])
    write(tmp_path, "cifar10/resnet20-full_preactivation", [7.6, 7.7, 7.8, 7.9])
    [own] = rows(section(tmp_path, "preact")).values()
    assert own["against the original"] == "lower"


def test_a_published_failure_is_higher_than_every_number(tmp_path):
    write(tmp_path, ORIGINAL, [6.5, 6.6, 6.7, 6.8])
    write(tmp_path, "cifar10/resnet110-original-none", [30.0, 31.0, 32.0, 33.0])
    write(tmp_path, "cifar10/resnet110-original-dropout", [5.4, 5.5, 5.6, 5.7])
    text = section(tmp_path, "table1")
    assert "\n1 of 2 pairs of rows have the published order: " in text  # two fails are no pair
    found = rows(text)
    plain, dropout = found["ResNet-110, constant scaling (0, 1)"], found[DROPOUT]
    assert (plain["published"], dropout["published"]) == ("fail (> 20)", "fail (> 20)")
    assert plain["against the original"] == "higher, as published"
    assert dropout["against the original"] == "lower, unlike published"


def test_a_mixed_row_is_refused_and_the_report_stays(tmp_path):
    write(tmp_path, FULL, [6.4, 6.5])
    report(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    results.write(tmp_path, record(FULL, 2, 6.3, dtype="mixed_bfloat16"))
    with pytest.raises(UserError, match=r"the runs of a row .* --model.precision"):
        report(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before


def test_same_results_same_bytes(tmp_path):
    found = {SMALL_FULL: [2.0, 3.0, 2.5], FULL: [6.4, None], "cifar10/resnet1001-original": [7.6]}
    found["digits/resnet10001-full_preactivation"] = [4.5]  # nothing is published for it
    runs = [
        record(trial, seed, error, errors=[60.0, error])
        for trial, errors in found.items()
        for seed, error in enumerate(errors)
    ]
    written = []
    for folder, ordered in ((tmp_path / "one", runs), (tmp_path / "other", runs[::-1])):
        for each in ordered:
            results.write(folder, each)
        report(folder)
        written.append({path.name: path.read_bytes() for path in folder.glob("*.*")})
    assert written[0] == written[1]
    drawn = {"deep.png", "digits.png", "figure1.png"}
    assert written[0].keys() == {"README.md", *drawn}
    assert drawn <= set(re.findall(r"\]\((.*?)\)", written[0]["README.md"].decode()))


def test_bands_leave_out_diverged_runs():
    runs = [
        record(FULL, 0, 6.0, errors=[50.0, 10.0, 6.0]),
        record(FULL, 1, None, errors=[90.0, None]),
        record(FULL, 2, 9.0, errors=[70.0, 30.0, 9.0]),
    ]
    iterations, band = pictures.band(runs, "test_error")
    assert iterations.tolist() == [10, 20, 30]
    np.testing.assert_allclose(band, [[50, 10, 6], [70, 20, 7.5], [90, 30, 9]])


def test_bands_of_runs_that_were_measured_at_different_iterations():
    often = record(FULL, 0, 6.0, errors=[50.0, 40.0, 10.0, 6.0])
    seldom = record(FULL, 1, 12.0, errors=[36.0, 12.0])
    seldom.curves["iteration"][:] = [15, 40]
    iterations, band = pictures.band([often, seldom], "test_error")
    assert iterations.tolist() == [10, 15, 20, 30, 40]
    low, high = [50, 36, 31.2, 10, 6], [50, 45, 40, 21.6, 12]
    np.testing.assert_allclose(band, [low, np.add(low, high) / 2, high])


@pytest.mark.parametrize("name", pictures.FIGURES)
def test_lines_of_a_panel_have_their_own_colours(name):
    figure = pictures.FIGURES[name]
    panels = pictures.measured(figure, dict.fromkeys(TRIALS, (None,)))
    assert panels == {title: list(names) for title, names in figure.panels.items()}
    colours = pictures.colours(figure, panels)
    for names in panels.values():
        assert len({colours[each] for each in names}) == len(names)
