"""The report says what the results say: numbers worked out by hand, words for few and
for diverged runs, no mixed rows.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.training.reproduce.records import record, write
from training.cli import UserError
from training.reproduce import pictures, results
from training.reproduce.report import report
from training.reproduce.rows import TABLES

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
    lines = [line for line in text.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_row(tmp_path):
    write(tmp_path, FULL, [6.9, 6.1, 6.4, 6.2, 6.9], seconds=7200.0, speed=1500.0, together=2)
    own = rows(section(tmp_path, "table2"))["ResNet-110, full_preactivation"]
    assert own == {
        **{"row": "ResNet-110, full_preactivation", "published": "6.37"},
        **{"median": "6.40", "difference": "+0.03", "mean +- std": "6.50 +- 0.38", "n": "5"},
        **{"time per run": "1 h 0 min", "images/s": "1,500"},
        **{"device": "NVIDIA H200", "precision": "float32"},
    }
    # the same trial in another table, beside another row
    assert rows(section(tmp_path, "table3"))["ResNet-110, full_preactivation"] == own


def test_a_row_of_a_small_table(tmp_path):
    options = {"device": "CPU", "test": 360}
    write(tmp_path, SMALL_FULL, [2.0, 3.0, 4.0], [0.1, 0.2, 0.4], **options)
    write(tmp_path, SMALL_ORIGINAL, [2.0, 3.0, 2.5], [2.1, 2.2, 2.3], **options)
    text = section(tmp_path, "digits2")
    own = rows(text)["ResNet-110, full_preactivation"]
    assert own["training loss, median"] == "0.2 (0.1 to 0.4)"
    assert own["mean +- std"] == "3.00 +- 1.00"
    assert own["95 % interval"] == "0.52 to 5.48"  # 4.303 / sqrt 3 on both sides
    loss, error = (line for line in text.splitlines() if "paper orders" in line)
    assert "1 in its order, 0 reversed, 0 equal" in loss
    assert "Clearly in its order: 1." in loss
    assert "0 in its order, 1 reversed, 0 equal" in error
    assert "Undecided with 3 runs per row and 360 test images: 1." in error


@pytest.mark.parametrize(
    ("trial", "errors", "median", "difference", "count", "reached"),
    [
        (FULL, [6.67], "6.67", "+0.30", "1", True),
        (FULL, [6.07], "6.07", "-0.30", "1", True),
        (FULL, [6.0], "6.00", "-0.37", "1", False),
        (FULL, [6.2, None, 6.3], "6.30", "-0.07", "3 (1 diverged)", True),
        (FULL, [6.2, None], "fail", "fails", "2 (1 diverged)", False),
        # a published fail is reached by a fail
        (
            "cifar10/resnet110-original-none",
            [None],
            "fail",
            "fails as well",
            "1 (1 diverged)",
            True,
        ),
        ("cifar10/resnet110-original-none", [20.5], "20.50", "fails as well", "1", True),
        ("cifar10/resnet110-original-none", [19.5], "19.50", "does not fail", "1", False),
    ],
)
def test_goal(tmp_path, trial, errors, median, difference, count, reached):
    write(tmp_path, trial, errors)
    full = trial == FULL
    text = section(tmp_path, "table2" if full else "table1")
    label = "ResNet-110, " + ("full_preactivation" if full else "constant scaling (0, 1)")
    own = rows(text)[label]
    assert (own["median"], own["difference"], own["n"]) == (median, difference, count)
    assert f"reached by {int(reached)} of 1 measured row." in text
    assert own["mean +- std"] == ("-" if None in errors else median)


def test_order(tmp_path):
    write(tmp_path, FULL, [6.3, 6.4, 6.5])  # the paper: 6.37
    write(tmp_path, ORIGINAL, [9.3, 9.4, 9.5])  # 6.61, clearly above the first
    # 6.71, equal to the first
    write(tmp_path, "cifar10/resnet110-relu_only_preactivation", [6.35, 6.4, 6.6])
    # 8.17, below the second by its one run
    write(tmp_path, "cifar10/resnet110-bn_after_addition", [9.35])
    write(tmp_path, "cifar10/resnet164-original", [7.0])  # networks are ordered each by itself
    text = section(tmp_path, "table2")
    # pairs of the paper: full < original < relu only < bn; ours: full = relu only < bn < original
    for part in (
        "the paper orders 6 pairs of measured rows. Our medians have 3 in its order, 2 reversed, "
        "1 equal: Kendall's tau is +0.17.",
        "Clearly in its order: 1. Clearly reversed: 1 (relu_only_preactivation is below original)",
        "Undecided with 1 to 3 runs per row and 10,000 test images: 4.",
        "ResNet-164, test error: no two measured rows are ordered in the paper.",
    ):
        assert part in text


def test_costs_are_told_by_device_and_a_run_of_two_tables_counts_once(tmp_path):
    for seed, (device, seconds) in enumerate(
        [("NVIDIA H200", 60.0), ("NVIDIA H100", 120.0), ("CPU", 6000.0)]
    ):
        results.write(tmp_path, record(FULL, seed, 6.4, device=device, seconds=seconds))
    found = made(tmp_path)
    own = rows(found[TABLES["table2"].title])["ResNet-110, full_preactivation"]
    assert own["time per run"] == "1 h 40 min; 2 min 0 s; 1 min 0 s"
    cost = "2 min 0 s of NVIDIA H100 (1 run), 1 min 0 s of NVIDIA H200 (1 run)"
    for table in ("table2", "table3"):
        assert f"- {TABLES[table].title}: 1 h 40 min of CPU (Xeon) (1 run), {cost}" in found["Cost"]
    assert f"counted once: 1 h 40 min of CPU (Xeon) (1 run), {cost}" in found["Cost"]


def test_a_mixed_row_is_refused_and_the_report_stays(tmp_path):
    write(tmp_path, FULL, [6.4, 6.5])
    report(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    results.write(tmp_path, record(FULL, 2, 6.3, dtype="mixed_bfloat16"))
    with pytest.raises(UserError, match=r"the runs of a row .* --model.dtype"):
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
    drawn = {"deep.png", "digits2.png", "figure1.png"}
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
