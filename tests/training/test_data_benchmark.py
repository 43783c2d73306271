"""The benchmark of the input, with few images."""

import json

import pytest

from training.benchmark import input_rate as benchmark
from training.cli import UserError


@pytest.mark.soak
def test_every_candidate_is_measured_in_every_round(tmp_path, capsys):
    options = benchmark.Input(
        rounds=2, seconds=0.02, batch=16, images=64, output=tmp_path / "input.json"
    )
    found = benchmark.run(options)
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "input.json").read_text())
    assert written["summary"] == found["summary"]
    assert (written["command"], written["machine"]["usable_cores"]) == ("input", 1)
    assert [set(figures) for figures in written["rounds"]] == [set(benchmark.CANDIDATES)] * 2
    for name in benchmark.CANDIDATES:
        rates = [figures[name]["images_per_second"] for figures in written["rounds"]]
        ratios = [
            figures[name]["images_per_second"] / figures["tf_data_map"]["images_per_second"]
            for figures in written["rounds"]
        ]
        assert min(rates) > 0
        entry = written["summary"][name]["images_per_second"]
        assert (entry["min"], entry["max"], entry["rounds"]) == (min(rates), max(rates), 2)
        assert entry["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
        assert f"  {name} " in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ("streams",)}, r"Unknown candidate: 'streams'. Did you mean 'stream'"),
        (
            {"candidates": ("stream",)},
            r"--baseline must be one of the candidates. Received: tf_data_map",
        ),
        ({"rounds": 0}, r"--rounds must be positive. Received: 0"),
        ({"batch": 9, "images": 8}, r"--batch must be at most --images. Received: 9 > 8"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        benchmark.run(benchmark.Input(**options))


def test_the_output_has_to_have_a_directory(tmp_path):
    with pytest.raises(UserError, match=r"there is no directory"):
        benchmark.run(benchmark.Input(output=tmp_path / "none" / "input.json"))
