"""The report says what the results say: numbers worked out by hand, words for few and
for diverged runs, no mixed rows.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.reproduce.records import record, write
from training.cli import UserError
from training.reproduce import depth, pictures, profiles, results
from training.reproduce.report import report
from training.reproduce.rows import FIGURES, TABLES

FULL, ORIGINAL = "cifar10/resnet110-full_preactivation", "cifar10/resnet110-original"
SMALL_FULL, SMALL_ORIGINAL = "digits/resnet110-full_preactivation", "digits/resnet110-original"


def made(folder: Path) -> dict[str, str]:
    """Write the report, and return its sections by their headings."""
    report(folder)
    parts = re.split(r"^## (.*)\n", (folder / "README.md").read_text(), flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def section(folder: Path, table: str) -> str:
    return made(folder)[TABLES[table].title]


def rows(text: str) -> dict[str, dict[str, str]]:
    """Return the rows of a Markdown table by their labels: heading to cell."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_nothing_measured(tmp_path):
    found = made(tmp_path / "none")
    assert not {table.title for table in TABLES.values()} & set(found)
    lines = [line for line in found["Not measured yet"].splitlines() if line.startswith("- ")]
    assert lines == [
        f"- {table.title}: {len(table.rows)} row{'s' * (len(table.rows) > 1)}"
        for table in TABLES.values()
    ]
    assert "No runs yet." in found["Cost"]
    assert sorted(path.name for path in (tmp_path / "none").iterdir()) == ["README.md"]


def test_measured_tables_come_first(tmp_path):
    write(tmp_path, "cifar10/resnet110-original-dropout", [25.0])
    write(tmp_path, SMALL_FULL, [2.0], device="CPU")
    found = made(tmp_path)
    titles = [TABLES[name].title for name in ("table1", "digits2")]
    assert list(found)[1:4] == [*titles, "Not measured yet"]
    assert len(rows(found[titles[0]])) == len(TABLES["table1"].rows)


def test_rows_that_fail_in_small_alone_are_explained(tmp_path):
    # fails in the paper too
    write(tmp_path, "digits/resnet110-original-none", [90.0], device="CPU")
    assert "does not contradict" not in section(tmp_path, "digits1")
    write(tmp_path, "digits/resnet110-original-conv1x1", [90.0], device="CPU")
    [line] = [
        line for line in section(tmp_path, "digits1").splitlines() if "does not contradict" in line
    ]
    assert line.startswith("- ResNet-110, 1x1 convolution (1x1 conv, 1): over 20 % here")
    assert "has 700 iterations, the paper's has 64,000" in line
    assert "2.30" in line


def test_published_numbers(tmp_path):
    for name in ("resnet110-original", "resnet1001-original", "resnet20-original"):
        write(tmp_path, f"cifar10/{name}", [7.0])
    found = made(tmp_path)

    def published(table: str, label: str) -> str:
        return rows(found[TABLES[table].title])[label]["published"]

    assert published("table2", "ResNet-110, full_preactivation") == "6.37"
    assert published("table1", "ResNet-110, constant scaling (0, 1)") == "fail (> 20)"
    assert published("table3", "ResNet-1001, full_preactivation") == "4.92 (4.89 +- 0.14)"
    assert published("first_paper", "ResNet-110, 110 layers") == "6.43 (best of 5, 6.61 +- 0.16)"


def test_row(tmp_path):
    write(tmp_path, FULL, [6.9, 6.1, 6.4, 6.2, 6.9], seconds=7200.0, speed=1500.0, together=2)
    own = rows(section(tmp_path, "table2"))["ResNet-110, full_preactivation"]
    assert own == {
        **{"row": "ResNet-110, full_preactivation", "published": "6.37"},
        **{"median": "6.40", "difference": "+0.03", "mean +- std": "6.50 +- 0.38", "n": "5"},
        **{
            "time per run": "1 h 0 min",
            "images/s": "1,500",
            "device": "NVIDIA H200",
            "precision": "float32",
        },
    }
    # the same trial in another table, beside another row
    assert rows(section(tmp_path, "table3"))["ResNet-110, full_preactivation"] == own


def test_what_all_rows_have_in_common_is_said_once(tmp_path):
    write(tmp_path, FULL, [6.4])
    write(tmp_path, ORIGINAL, [6.6])
    text = section(tmp_path, "table2")
    own = rows(text)
    assert not {"device", "precision"} & set(own["ResNet-110, original"])
    assert own["ResNet-164, original"]["n"] == "-"
    assert "All rows: device: NVIDIA H200; precision: float32." in text
    write(tmp_path, "cifar10/resnet164-original", [5.9], device="NVIDIA H100")
    text = section(tmp_path, "table2")
    assert rows(text)["ResNet-164, original"]["device"] == "NVIDIA H100"
    assert "All rows: precision: float32." in text


def test_networks_are_ordered_each_by_itself(tmp_path):
    for name, error in (
        ("110-original", 6.0),
        ("110-full_preactivation", 6.5),
        ("164-original", 7.0),
    ):
        write(tmp_path, f"cifar10/resnet{name}", [error])
    write(tmp_path, "cifar10/resnet20-original", [8.8])
    write(tmp_path, "cifar10/resnet32-original", [7.4])
    text = section(tmp_path, "table2")
    assert (
        "ResNet-110, test error: the paper orders 1 pair of measured rows. Our medians have 0 in "
        "its order, 1 reversed" in text
    )
    assert "ResNet-164, test error: no two measured rows are ordered in the paper." in text
    # but depths with each other, where they are what the table is about: 20, 32 and 110 layers
    assert "Test error: the paper orders 3 pairs of measured rows. Our medians have 3" in section(
        tmp_path, "first_paper"
    )


def test_costs_of_two_devices_are_not_taken_together(tmp_path):
    for seed, (device, seconds) in enumerate(
        [("NVIDIA H200", 60.0), ("NVIDIA H100", 120.0), ("CPU", 6000.0)]
    ):
        results.write(tmp_path, record(FULL, seed, 6.4, device=device, seconds=seconds))
    found = made(tmp_path)
    own = rows(found[TABLES["table2"].title])["ResNet-110, full_preactivation"]
    assert own["device"] == "CPU (Xeon); NVIDIA H100; NVIDIA H200"
    assert own["time per run"] == "1 h 40 min; 2 min 0 s; 1 min 0 s"
    assert "2 min 0 s of NVIDIA H100 (1 run), 1 min 0 s of NVIDIA H200 (1 run)" in found["Cost"]


def test_cost_counts_a_run_of_two_tables_once(tmp_path):
    write(tmp_path, ORIGINAL, [6.6, 6.7], seconds=600.0)
    cost = made(tmp_path)["Cost"]
    for table in ("table1", "table2", "table3", "first_paper"):
        assert f"- {TABLES[table].title}: 20 min 0 s of NVIDIA H200 (2 runs)" in cost
    assert "counted once: 20 min 0 s of NVIDIA H200 (2 runs)" in cost
    assert "commit 0123abc, backend jax, jax 0.10.0, keras 3.15.1: 2 runs" in cost


@pytest.mark.parametrize(
    ("errors", "median", "difference", "count", "reached"),
    [
        ([6.67], "6.67", "+0.30", "1", True),
        ([6.07], "6.07", "-0.30", "1", True),
        ([6.68], "6.68", "+0.31", "1", False),
        ([6.0], "6.00", "-0.37", "1", False),
        ([6.2, None, 6.3], "6.30", "-0.07", "3 (1 diverged)", True),
        ([6.2, None], "fail", "fails", "2 (1 diverged)", False),
    ],
)
def test_goal(tmp_path, errors, median, difference, count, reached):
    write(tmp_path, FULL, errors)
    text = section(tmp_path, "table2")
    own = rows(text)["ResNet-110, full_preactivation"]
    assert (own["median"], own["difference"], own["n"]) == (median, difference, count)
    assert f"reached by {int(reached)} of 1 measured row." in text
    assert (f"Not by ResNet-110, full_preactivation ({difference})." in text) is not reached
    assert "1 of 1 has fewer than the paper's 5 runs." in text
    assert own["mean +- std"] == ("-" if None in errors else median)


@pytest.mark.parametrize(
    ("error", "median", "reached"),
    [(None, "fail", True), (20.5, "20.50", True), (19.5, "19.50", False)],
)
def test_a_published_fail_is_reached_by_a_fail(tmp_path, error, median, reached):
    write(tmp_path, "cifar10/resnet110-original-none", [error])
    text = section(tmp_path, "table1")
    own = rows(text)["ResNet-110, constant scaling (0, 1)"]
    assert (own["median"], own["difference"]) == (
        median,
        "fails as well" if reached else "does not fail",
    )
    assert f"reached by {int(reached)} of 1 measured row." in text


def test_order(tmp_path):
    write(tmp_path, FULL, [6.3, 6.4, 6.5])  # the paper: 6.37
    write(tmp_path, ORIGINAL, [9.3, 9.4, 9.5])  # 6.61, clearly above the first
    # 6.71, equal to the first
    write(tmp_path, "cifar10/resnet110-relu_only_preactivation", [6.35, 6.4, 6.6])
    # 8.17, below the second by its one run
    write(tmp_path, "cifar10/resnet110-bn_after_addition", [9.35])
    text = section(tmp_path, "table2")
    # pairs of the paper: full < original < relu only < bn; ours: full = relu only < bn < original
    assert (
        "the paper orders 6 pairs of measured rows. Our medians have 3 in its order, 2 reversed"
        in text
    )
    assert ", 1 equal: Kendall's tau is +0.17." in text
    assert (
        "Clearly in its order: 1. Clearly reversed: 1 (relu_only_preactivation is below original). "
        "Undecided with 1 to 3 runs per row and 10,000 test images: 4."
    ) in text
    assert "Fewer than 5 runs: ResNet-110, original (3); ResNet-110, bn_after_addition (1);" in text
    assert "Not measured yet: ResNet-164, original; " in text
    # of one of two data sets each
    write(tmp_path, "cifar100/resnet164-original", [25.0])
    assert "the paper orders 1 pair of measured rows" in section(tmp_path, "table3")


def test_small_table(tmp_path):
    options = {"device": "CPU", "test": 360}
    write(tmp_path, SMALL_FULL, [2.0, 3.0, 4.0], [0.1, 0.2, 0.4], **options)
    write(tmp_path, SMALL_ORIGINAL, [2.0, 3.0, 2.5], [2.1, 2.2, 2.3], **options)
    text = section(tmp_path, "digits2")
    own = rows(text)["ResNet-110, full_preactivation"]
    assert (own["published, CIFAR-10"], own["training loss, median"]) == (
        "6.37",
        "0.2 (0.1 to 0.4)",
    )
    assert own["mean +- std"] == "3.00 +- 1.00"
    assert own["95 % interval"] == "0.52 to 5.48"  # 4.303 / sqrt 3 on both sides
    loss, error = (line for line in text.splitlines() if "paper orders" in line)
    assert "Training loss" in loss
    assert "1 in its order, 0 reversed, 0 equal" in loss
    assert "Clearly in its order: 1." in loss
    assert "Undecided" not in loss
    assert "0 in its order, 1 reversed, 0 equal" in error
    assert "Clearly in its order: 0. Clearly reversed: 0. " in error
    assert "Undecided with 3 runs per row and 360 test images: 1." in error
    assert "Goal" not in text
    assert "![Table 2 in small, on digits](digits2.png)" in text


def test_a_table_without_published_numbers(tmp_path):
    write(tmp_path, "digits/resnet10001-full_preactivation", [4.5, 3.5], [0.1, 0.2], device="CPU")
    text = section(tmp_path, "deep")
    [own] = rows(text).values()
    assert own == {
        "row": "ResNet-10001, full_preactivation, DepthScaledHe",
        "parameters": "1,727,962",
        "iterations": "700",
        "training loss, median": "0.15 (0.1 to 0.2)",
        "test error, median": "4.00",
        "mean +- std": "4.00 +- 0.71",
        "n": "2",
        "time per run": "10 min 0 s",
        "images/s": "2,000",
        "device": "CPU (Xeon)",
        "precision": "float32",
    }
    assert not re.search("paper|published|Goal", text)
    assert text.lstrip().startswith("A quarter of the channels")
    assert "![Ten thousand layers, on digits](deep.png)" in text
    assert (tmp_path / "deep.png").is_file()


def test_all_runs_of_a_row_diverged(tmp_path):
    write(tmp_path, SMALL_FULL, [None, None], device="CPU")
    own = rows(section(tmp_path, "digits2"))["ResNet-110, full_preactivation"]
    assert own["n"] == "2 (2 diverged)"
    assert (own["test error, median"], own["training loss, median"]) == ("fail", "fail")


def test_a_mixed_row_is_refused_and_the_report_stays(tmp_path):
    write(tmp_path, FULL, [6.4, 6.5])
    report(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    assert before
    results.write(tmp_path, record(FULL, 2, 6.3, dtype="mixed_bfloat16"))
    with pytest.raises(
        UserError, match=r"resnet110-full_preactivation: the runs of a row .* --model.dtype"
    ):
        report(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before


def test_without_matplotlib_nothing_is_written(tmp_path, monkeypatch):
    write(tmp_path, SMALL_FULL, [2.0])
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'keras-preact\[training\]'"):
        report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_same_results_same_bytes(tmp_path, capsys):
    runs = [
        record(SMALL_FULL, seed, error, errors=[60.0, error])
        for seed, error in enumerate([2.0, 3.0, 2.5])
    ]
    runs += [
        record(FULL, seed, error, errors=[60.0, error]) for seed, error in enumerate([6.4, None])
    ]
    runs += [record("cifar10/resnet1001-original", 0, 7.6, errors=[60.0, 7.6])]
    names = ["README.md", "digits2.png", "figure1.png"]
    for folder, made in ((tmp_path / "one", runs), (tmp_path / "other", runs[::-1])):
        for each in made:
            results.write(folder, each)
        report(folder)
        assert sorted(path.name for path in folder.glob("*.*")) == names
        said = capsys.readouterr().out
        assert all(str(folder / name) in said for name in names)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    for link in re.findall(r"\]\((.*?\.(?:md|png))\)", (tmp_path / "one/README.md").read_text()):
        assert (tmp_path / "one" / link).is_file()


def test_band_is_over_the_runs_that_have_a_number():
    runs = [
        record(FULL, 0, 6.0, errors=[50.0, 10.0, 6.0]),
        record(FULL, 1, None, errors=[90.0, None]),
        record(FULL, 2, 9.0, errors=[70.0, 30.0, 9.0]),
    ]
    iterations, band = pictures.band(runs, "test_error")
    assert iterations.tolist() == [10, 20, 30]
    np.testing.assert_allclose(band, [[50, 10, 6], [70, 20, 7.5], [90, 30, 9]])
    iterations, band = pictures.band([record(FULL, 0, None)], "test_error")
    assert (len(iterations), band.shape) == (0, (3, 0))


def test_a_baseline_alone_makes_no_panel():
    baseline = {ORIGINAL: [record(ORIGINAL, 0, 6.6)]}
    assert pictures.measured(FIGURES["figure3"], baseline) == {}
    scaled = "cifar10/resnet110-original-constant_scaling-0.5-0.5"
    panels = pictures.measured(FIGURES["figure3"], baseline | {scaled: [record(scaled, 0, 12.0)]})
    assert {title: [trial.name for _, trial in own] for title, own in panels.items()} == {
        "constant scaling": [scaled, ORIGINAL]
    }
    assert list(pictures.measured(FIGURES["figure6"], baseline)) == ["ResNet-110"]


def blue(path: Path) -> int:
    """Return how many pixels have the colour of the first row."""
    image = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return int((np.abs(image - [0x00, 0x72, 0xB2]).sum(-1) < 40).sum())


@pytest.mark.parametrize(
    "errors", [[50.0, 20.0, 6.0], [6.0], [90.0, None]], ids=["run", "point", "diverged"]
)
def test_curves_of_any_runs_are_drawn(tmp_path, errors):
    def draw(errors, name: str) -> int:
        own = "cifar10/resnet1001-original"
        groups = {own: [record(own, seed, errors[-1], errors=errors) for seed in range(2)]}
        pictures.curves(FIGURES["figure1"], groups, tmp_path / name)
        return blue(tmp_path / name)

    # without a number, there is the legend alone
    assert draw(errors, "figure.png") > 20 + draw([None], "none.png")


@pytest.mark.parametrize("errors", [[2.0], [2.0, 4.0, None], [None], [0.0, 0.0], [0.01, 50.0]])
def test_spreads_of_any_runs_are_drawn(tmp_path, errors):
    groups = {SMALL_FULL: [record(SMALL_FULL, seed, error) for seed, error in enumerate(errors)]}
    pictures.spreads(TABLES["digits2"], groups, tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        image.verify()


def test_depth(tmp_path):
    assert not any(heading.startswith("Depth") for heading in made(tmp_path))
    settings = profiles.settings_of("preact", 11, batch=2, seed=0)
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth/preact-11.json").write_text(json.dumps(profiles.measure(settings)))
    text = made(tmp_path)["Depth before training"]
    assert depth.table(depth.read(tmp_path)) in text
    assert "![Depth before training](depth.png)" in text
    with Image.open(tmp_path / "depth.png") as image:
        image.verify()


def test_runs_of_no_row_are_named(tmp_path):
    results.write(
        tmp_path, dataclasses.replace(record(FULL, 0, 6.4), trial="cifar10/resnet99-strange")
    )
    assert "Runs of no row: cifar10/resnet99-strange" in made(tmp_path)["Cost"]
