"""The report agrees with the results: numbers by hand, words for few runs and for diverged
runs, no mixed rows.
"""

import collections
import dataclasses
import re
import types
from pathlib import Path

import numpy as np
import pytest

import keras_preact as kp
from keras_preact.analysis.figures import style
from tests import layout
from tests.training.reproduce.records import record, write
from training.config import Model
from training.errors import UserError
from training.reproduce import pictures, results
from training.reproduce.report import report
from training.reproduce.rows import OWN, PAPER, TABLES, TRIALS

FULL, ORIGINAL = "cifar10/resnet110-full_preactivation", "cifar10/resnet110-original"
SMALL_FULL, SMALL_1001 = (
    "digits/resnet110-full_preactivation",
    "digits/resnet1001-full_preactivation",
)


def section(folder: Path, title: str) -> str:
    """Write the report without drawing its pictures, and return a section of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("curves", "strip", "by_depth"):
            patch.setattr(pictures, name, lambda *_: style.new_figure())
        report(folder)
    parts = re.split(r"^## (.*)\n", (folder / "README.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


#: Title of a part of the paper by its published tables.
PARTS = {part.published: part.title for part in PAPER}
ARRANGEMENTS, SHORTCUTS = PARTS[("2",)], PARTS[("1",)]
AS_PUBLISHED = "as in the paper"


def rows(text: str) -> dict[str, dict[str, str]]:
    """Return the rows of a Markdown table: label to heading to cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_every_published_row_and_every_table_is_on_the_page(tmp_path):
    """Also rows that nothing was measured of; the contents count and link them all."""
    write(tmp_path, ORIGINAL, [6.5])
    section(tmp_path, SHORTCUTS)
    page = (tmp_path / "README.md").read_text()
    shown = [result for part in PAPER for result in part.results()]
    assert sorted(shown, key=repr) == sorted(kp.published.RESULTS, key=repr)
    beside = {name for part in PAPER for names in part.columns.values() for name in names}
    assert beside | set(OWN) == set(TABLES)
    for part in PAPER:
        found = rows(section(tmp_path, part.title))
        assert all(
            cells.get(AS_PUBLISHED, "").startswith("6.50<br>") == (cells["published"] == "6.61")
            for label, cells in found.items()
            if "original" in label or "identity" in label
        )
        [count] = re.findall(rf"^\| \[{re.escape(part.title)}\]\(.*?\) \| (\d+) ", page, re.M)
        assert int(count) == len(part.results()) == len(found)
    # four published tables have this network
    assert page.count("| 6.50<br>n = 1, H200, 10 min 0 s |") == 4


def test_smaller_settings_stand_beside_their_published_row(tmp_path):
    for name in ("original", "full_preactivation"):
        write(tmp_path, f"digits/resnet110-{name}", [2.0])
        write(tmp_path, f"digits/resnet1001-{name}", [3.0])
    write(tmp_path, "cifar10/resnet20-full_preactivation", [8.0])
    found = rows(section(tmp_path, ARRANGEMENTS))
    small = "digits, a quarter of the channels"
    assert {
        label: cells[small][:4] for label, cells in found.items() if cells[small] != "not measured"
    } == {
        "ResNet-110, original": "2.00",
        "ResNet-110, full pre-activation": "2.00",
    }
    found = rows(section(tmp_path, PARTS[("3", "4")]))
    assert {
        label: cells[small][:4] for label, cells in found.items() if cells[small][0].isdigit()
    } == {
        "ResNet-110, original": "2.00",
        "ResNet-110, full pre-activation": "2.00",
        "ResNet-1001, original": "3.00",
        "ResNet-1001, full pre-activation": "3.00",
    }
    assert found["CIFAR-100, ResNet-1001, original"][small] == "-"
    cells = rows(section(tmp_path, PARTS[("6 of 1512.03385",)]))["ResNet-20"]
    assert AS_PUBLISHED not in cells  # nothing was measured so; the command for it is named
    assert (
        f"- {AS_PUBLISHED}: `keras-preact reproduce first-paper`. Not measured yet."
        in (tmp_path / "README.md").read_text()
    )
    assert cells["full pre-activation instead"].startswith("8.00<br>")


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
        results.write(tmp_path, record(SMALL_1001, seed, error, errors=errors, device=device))
    found = rows(section(tmp_path, TABLES["deep"].title))
    name = "ResNet-1001, full pre-activation, on"
    assert {label: (row["test error"], row["n"]) for label, row in found.items()} == {
        f"{name} CPU, 20 iterations": ("6.20 (6.00 to diverged)", "3"),
        f"{name} CPU, 30 iterations": ("5.00", "1"),
        f"{name} H200": ("7.00", "1"),
    }
    cell = rows(section(tmp_path, PARTS[("3", "4")]))["ResNet-1001, full pre-activation"]
    assert re.findall(r"n = \d, \w+", cell["digits, a quarter of the channels"]) == [
        *("n = 3, CPU", "n = 1, CPU", "n = 1, H200")
    ]


def test_row(tmp_path):
    write(tmp_path, FULL, [6.9, 6.1, 6.4, 6.2, 6.9], seconds=7200.0, together=2)
    found = section(tmp_path, ARRANGEMENTS)
    own = rows(found)["ResNet-110, full pre-activation"]
    cell = "6.40 (6.10 to 6.90)<br>n = 5, H200, 1 h 0 min"
    assert (own["published"], own[AS_PUBLISHED]) == ("6.37", cell)
    assert "Runs: 5 on NVIDIA H200 in float32, 5 h 0 min in all." in found
    # the same trial in another table, beside another row
    other = rows(section(tmp_path, PARTS[("3", "4")]))["ResNet-110, full pre-activation"]
    assert other[AS_PUBLISHED] == cell


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
    found = rows(section(tmp_path, TABLES["shortcuts"].title))
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
    own = [cells[AS_PUBLISHED] for cells in rows(section(tmp_path, ARRANGEMENTS)).values()]
    assert [cell.partition("<br>")[0] for cell in own if cell != "not measured"] == [
        *("diverged (6.20 to diverged)", "diverged", "6.30 (6.20 to diverged)")
    ]


def test_views_of_the_test_images(tmp_path):
    views = {"one": {"accuracy": 0.93}, "flip_shift": {"accuracy": 0.94}}
    run = record("cifar10/fast_resnet8", 0, 7.0)
    results.write(tmp_path, dataclasses.replace(run, views=views))
    own = rows(section(tmp_path, TABLES["fast"].title))["cifar_fast_resnet8"]
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
    text = section(tmp_path, ARRANGEMENTS)
    assert " 7 of 10 pairs of rows have the published order by their medians. " in text
    assert "as published for 5 pairs, opposite for 1, and not clear for 4." in text
    assert " Opposite: ResNet-110, original > ResNet-110, ReLU-only pre-activation.\n" in text
    assert verdicts(text) == {
        "ResNet-110, full pre-activation": "lower, as published",
        "ResNet-110, ReLU-only pre-activation": "lower, unlike published",
        "ResNet-110, ReLU before addition": "higher, as published",
        "ResNet-110, BN after addition": "not clear",  # one run
        # the original ResNet-164 was not measured
    }
    # nothing is published for these, and the original is in another table
    write(tmp_path, "cifar10/resnet20-original", [8.6, 8.7, 8.8, 8.9])
    write(tmp_path, "cifar10/resnet20-full_preactivation", [7.6, 7.7, 7.8, 7.9])
    text = section(tmp_path, PARTS[("6 of 1512.03385",)])
    assert verdicts(text, "full pre-activation instead") == {"ResNet-20": "lower"}
    # the first table has the sums
    page = (tmp_path / "README.md").read_text()
    assert re.search(rf"\[{re.escape(ARRANGEMENTS)}\]\S* \| 10 \| 6 \| 0 \| 2 \| 1 \| 1 \|", page)


def verdicts(text: str, heading: str = AS_PUBLISHED) -> dict[str, str]:
    """Return the verdict on each row of a section that has one."""
    found = {
        label: re.search(r": \*{1,2}([^*]*)\*{1,2}$", cells[heading])
        for label, cells in rows(text).items()
    }
    return {label: verdict[1] for label, verdict in found.items() if verdict}


def test_a_published_failure_is_higher_than_every_number(tmp_path):
    write(tmp_path, ORIGINAL, [6.5, 6.6, 6.7, 6.8])
    write(tmp_path, "cifar10/resnet110-original-none", [30.0, 31.0, 32.0, 33.0])
    write(tmp_path, "cifar10/resnet110-original-dropout", [5.4, 5.5, 5.6, 5.7])
    text = section(tmp_path, SHORTCUTS)
    assert " 1 of 2 pairs of rows have the published order " in text  # two fails are no pair
    names = {
        "plain": "constant scaling (0, 1)<br>(plain net)",
        "dropout": "dropout (dropout 0.5, 1)",
    }
    found = rows(text)
    assert {found[name]["published"] for name in names.values()} == {"fail (> 20)"}
    assert verdicts(text) == {
        names["plain"]: "higher, as published",
        names["dropout"]: "lower, unlike published",
    }


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
    drawn = {"deep.svg", "digits2.svg", "figure1.svg", "figure6.svg"}
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


def look(model: Model) -> object:
    """Return what `pictures.hue` reads of a run of this model."""
    return types.SimpleNamespace(config={"model": dataclasses.asdict(model)})


def test_a_name_has_one_colour():
    """Every arrangement and every shortcut, in all pictures; a network with identity
    shortcuts has the colour of its arrangement.
    """
    assert set(style.NAMED_HUES) == {*kp.ARRANGEMENTS, *kp.SHORTCUTS} - {"identity"}
    for row in (row for table in TABLES.values() for row in table.rows):
        of = row.published.arguments.get("arrangement") if row.published else None
        h = row.published.arguments.get("shortcut", "identity") if row.published else None
        if of and isinstance(h, str):
            assert pictures.hue(look(row.trial.model)) == style.hue(of, h)
    chain = TRIALS["digits/plain1000-sgd"].model
    assert pictures.hue(look(chain)) == style.NAMED_HUES["none"]


#: The pictures by depth, with the names of the trials of one depth.
AT_ONE_DEPTH = {
    name: dataclasses.replace(
        figure,
        panels={
            title: tuple(each.format(pictures.DEPTHS[0]) for each in names)
            for title, names in figure.panels.items()
        },
    )
    for name, figure in pictures.BY_DEPTH.items()
}


@pytest.mark.parametrize("name", [*pictures.FIGURES, *AT_ONE_DEPTH])
def test_lines_of_a_panel_differ_in_colour_or_dashes_and_have_short_names(name):
    """Each panel has its trials, no more of a colour than there are dashes, and a colour is
    that of one shortcut.
    """
    figure = (pictures.FIGURES | AT_ONE_DEPTH)[name]
    panels = pictures.measured(figure, dict.fromkeys(TRIALS, (None,)))
    assert panels == {title: list(names) for title, names in figure.panels.items()}
    labels = {row.trial.name: row.label for row in TABLES[figure.table].rows}
    everything = {row.trial.name: row.label for each in TABLES.values() for row in each.rows}
    for title, names in panels.items():
        hues = collections.Counter(pictures.hue(look(TRIALS[each].model)) for each in names)
        assert max(hues.values()) <= len(style.DASHES)
        shown = [pictures._short((everything | labels)[each], title) for each in names]
        assert len(set(shown)) == len(shown)
        assert all(0 < len(label) <= 36 for label in shown), shown


def test_pictures():
    """Texts do not overlap, also if all lines end at one place; all panels have the same axes;
    diverged runs, and values outside the axes, are marked.
    """
    groups = {}
    for trial in (f"digits/{name}" for name in ("resnet110-original", "resnet110-original-none")):
        errors = ([90.0, 30.0, 5.0], [90.0, 40.0, 5.5])
        groups[trial] = [record(trial, i, each[-1], errors=each) for i, each in enumerate(errors)]
    for name, error in (("constant_scaling-0.5-1", 5.0), ("constant_scaling-0.5-0.5", None)):
        trial = f"digits/resnet110-original-{name}"
        groups[trial] = [record(trial, 0, error, 0.5 if error else 1e9, [90.0, 5.0, error])]
    for name, error in (("conv1x1", 5.0), ("dropout", None)):  # each with one measurement at most
        trial = f"digits/resnet110-original-{name}"
        groups[trial] = [record(trial, 0, error)]
    labels = {row.trial.name: row.label for row in TABLES["digits1"].rows}
    figure = pictures.curves(pictures.FIGURES["digits1"], labels, groups)
    layout.check(figure)
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(shown) == 4  # two panels, errors above losses
    assert len({axes.get_ylim() for axes in shown}) == 2
    names = {text.get_text() for axes in shown for text in axes.texts}
    assert names == {
        *("(0, 1), n = 2", "(0.5, 1), n = 1", "(0.5, 0.5), n = 1, diverged"),
        *("identity (1, 1), n = 2", "1x1 convolution, n = 1", "dropout, n = 1, diverged"),
    }
    markers = collections.Counter(
        line.get_marker() for axes in shown for line in axes.lines if len(line.get_xdata())
    )
    assert markers["x"] == 4  # above and below, of two diverged trials
    assert markers["^"] >= 1
    assert markers["o"] == 2  # a trial that was measured once
    ranges = [len(axes.collections) for axes in shown]
    assert ranges == [2, 1, 2, 1]  # of two runs each


def test_errors_by_depth():
    """A line goes from depth to depth, with the median and the range of the runs of the largest
    group; a row with one depth is not drawn, nor a panel with the baseline alone.
    """
    errors = {
        "original": {8: [14.0, 12.0, 13.0], 20: [9.0, 10.0], 56: [12.0]},
        "original-none": {8: [15.0], 20: [30.0, None, None], 56: [34.0]},
        "original-constant_scaling-0.5-1": {8: [16.0], 56: [21.0]},
        "original-conv1x1": {8: [12.0]},
    }
    groups = {
        (trial := f"cifar10/resnet{depth}-{name}-eighth"): [
            record(trial, seed, error) for seed, error in enumerate(each)
        ]
        for name, row in errors.items()
        for depth, each in row.items()
    }
    trial = "cifar10/resnet8-original-eighth"
    groups[trial].append(record(trial, 3, 50.0, device="CPU"))
    shown = pictures.BY_DEPTH["eighth1_depths"]
    labels = {row.trial.name: row.label for row in TABLES[shown.table].rows}
    figure = pictures.by_depth(shown, labels, groups)
    layout.check(figure)
    [axes] = [axes for axes in figure.axes if axes.axison]
    assert axes.get_title("left") == "constant scaling"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["8", "20", "56"]
    assert {text.get_text() for text in axes.texts} == {
        *("identity (1, 1), n = 3, 2, 1", "(0, 1), n = 1, 3, 1", "(0.5, 1), n = 1, 1"),
    }
    lines = [line for line in axes.lines if line.get_marker() == "o"]
    top = axes.get_ylim()[1]
    for line, expected in zip(lines, ([15, top, 34], [16, 21], [13, 9.5, 12]), strict=True):
        np.testing.assert_allclose(line.get_ydata(), expected)
    for line, expected in zip(lines, ([8, 20, 56], [8, 56], [8, 20, 56]), strict=True):
        np.testing.assert_allclose(line.get_xdata(), expected, rtol=0.05)
    ranges = [[segment[:, 1].tolist() for segment in of.get_segments()] for of in axes.collections]
    assert ranges[2] == [[12, 14], [9, 10], [12, 12]]
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_ydata().tolist() for line in crosses] == [[top], [], []]
    assert not pictures.measured(shown, pictures.at_depths({trial: groups[trial]}))


def test_fast_runs_are_dots_by_device_and_views():
    views = {"one": {"accuracy": 0.93}, "flip_shift": {"accuracy": 0.94}}
    runs = [
        dataclasses.replace(record("cifar10/fast_resnet8", seed, 7.0, device=device), views=views)
        for seed, device in enumerate(["CPU", "CPU", "NVIDIA H100 80GB HBM3"])
    ]
    figure = pictures.strip("CIFAR-10 in minutes", runs)
    layout.check(figure)
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        *("CPU, one view, n = 2", "CPU, 6 views, n = 2"),
        *("H100, one view, n = 1", "H100, 6 views, n = 1"),
    ]
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [7, 7])
    np.testing.assert_allclose(axes.lines[2].get_xdata(), [6, 6])
