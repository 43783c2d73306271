"""`keras-preact reproduce claims`: each claim is measured, its verdict follows from the
numbers, and the committed findings are what the functions return.
"""

import dataclasses
import importlib
import inspect
import json
import pkgutil

import pytest

from tests.training.calls import error_of, words
from tests.training.reproduce.records import record, write
from training.reproduce import __main__ as main
from training.reproduce import claims as package
from training.reproduce import rates, results
from training.reproduce.claims import check, printed, trained
from training.reproduce.claims.finding import Finding, conditional, decided
from training.reproduce.results import RESULTS

CLAIMS = check.all_claims()
#: Claims that are measured in about a second.
QUICK = (
    *("not-negative", "zero-branch", "zero-branch-original", "branch-scale"),
    *("gate-10", "dropout-mean", "dropout-variance", "chapter-code"),
    *("orthogonal-norms", "chi", "phases", "correlations", "linear-rate", "linear-orthogonal"),
)
ORIGINAL, PREACT = "digits/resnet110-original", "digits/resnet110-full_preactivation"
OTHER = "digits/resnet110-relu_only_preactivation"


def reads_results(claim: check.Claim) -> bool:
    return "folder" in inspect.signature(claim.function).parameters


def test_every_claim_has_a_function_and_every_function_a_claim():
    for claim in CLAIMS.values():
        folder = {"folder": RESULTS} if reads_results(claim) else {}
        inspect.signature(claim.function).bind(**folder, **claim.arguments)
        assert inspect.getdoc(claim.function)
        assert claim.claim.endswith(".")
        assert claim.where
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
        if module.name not in ("check", "finding")
    ]
    measures = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and function.__annotations__.get("return") is Finding
    }
    assert measures == {claim.measure for claim in CLAIMS.values()}


def test_there_are_many_claims_and_each_has_a_finding():
    findings = check.read()
    assert list(findings) == list(CLAIMS)
    assert len(findings) >= 60
    for finding in findings.values():
        assert bool(finding["condition"]) == (finding["verdict"] == "true if")
        assert finding["text"].endswith(".")


@pytest.mark.parametrize(
    "name",
    [name for name, each in CLAIMS.items() if each.function.__module__ == printed.__name__]
    + [name for name, claim in CLAIMS.items() if reads_results(claim)],
)
def test_findings_are_those_of_the_committed_results(name):
    finding, committed = CLAIMS[name].find(RESULTS), check.read()[name]
    kept = {field: committed[field] for field in ("verdict", "text", "condition")}
    assert kept == {field: getattr(finding, field) for field in kept}


@pytest.mark.parametrize("name", [name for name, each in CLAIMS.items() if reads_results(each)])
def test_without_runs_a_claim_is_not_measured(name, tmp_path):
    assert CLAIMS[name].find(tmp_path).verdict == "unmeasured"


@pytest.mark.parametrize("name", QUICK)
def test_verdicts_are_those_of_the_committed_measurements(name):
    assert CLAIMS[name].find(RESULTS).verdict == check.read()[name]["verdict"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [name for name, each in CLAIMS.items() if name not in QUICK and not each.slow]
)
def test_all_verdicts_are_those_of_the_committed_measurements(name):
    assert CLAIMS[name].find(RESULTS).verdict == check.read()[name]["verdict"]


LOW, HIGH, MIXED = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, None], [2.5, 3.5, 6.5, 7.5]
MORE = [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize(
    ("errors", "call", "verdict"),
    [
        ((LOW, HIGH), lambda f: trained.higher(f, PREACT, ORIGINAL), "true"),
        ((HIGH, LOW), lambda f: trained.higher(f, PREACT, ORIGINAL), "false"),
        ((LOW, MIXED), lambda f: trained.higher(f, PREACT, ORIGINAL), "not clear"),
        ((LOW[:1], HIGH[:1]), lambda f: trained.higher(f, PREACT, ORIGINAL), "not clear"),
        ((LOW, LOW), lambda f: trained.similar(f, PREACT, ORIGINAL, 4.0), "true"),
        ((LOW, LOW), lambda f: trained.similar(f, PREACT, ORIGINAL, 0.1), "not clear"),
        ((LOW[:1], LOW[:1]), lambda f: trained.similar(f, PREACT, ORIGINAL, 9.0), "not clear"),
        ((LOW, MIXED), lambda f: trained.similar(f, PREACT, ORIGINAL, 0.1), "not clear"),
        ((LOW, HIGH), lambda f: trained.similar(f, PREACT, ORIGINAL, 2.0), "false"),
        ((LOW, MORE), lambda f: trained.similar(f, PREACT, ORIGINAL, 9.0), "true"),
        ((LOW, HIGH, HIGH), lambda f: trained.any_harms(f, [PREACT, OTHER], ORIGINAL), "true"),
        (
            (LOW, HIGH, MIXED),
            lambda f: trained.any_harms(f, [PREACT, OTHER], ORIGINAL),
            "not clear",
        ),
        ((LOW, HIGH), lambda f: trained.any_harms(f, [PREACT, OTHER], ORIGINAL), "unmeasured"),
        (([19.0],), lambda f: trained.limit(f, ORIGINAL, PREACT), "unmeasured"),
        (([90.0] * 3,), lambda f: trained.limit(f, ORIGINAL, PREACT), "false"),
        # of two rows, one looks lower by chance in one of ten cases
        ((HIGH, HIGH, LOW), lambda f: trained.any_harms(f, [PREACT, OTHER], ORIGINAL), "not clear"),
        (
            ([*HIGH, 8.0], HIGH, [*LOW, 0.5]),
            lambda f: trained.any_harms(f, [PREACT, OTHER], ORIGINAL),
            "false",
        ),
        (([90.0, 19.0],), lambda f: trained.learns(f, ORIGINAL), "true"),
        (([90.0, None],), lambda f: trained.learns(f, ORIGINAL), "not clear"),
        (([90.0, None, 20.0],), lambda f: trained.learns(f, ORIGINAL), "false"),
        (([90.0, None, 20.0],), lambda f: trained.fails(f, ORIGINAL), "true"),
        (([90.0, 19.0, 90.0],), lambda f: trained.fails(f, ORIGINAL), "false"),
        (([19.0], [90.0] * 3), lambda f: trained.limit(f, ORIGINAL, PREACT), "true"),
        (([19.0], [90.0] * 2), lambda f: trained.limit(f, ORIGINAL, PREACT), "not clear"),
        (([90.0], [90.0] * 3), lambda f: trained.limit(f, ORIGINAL, PREACT), "not clear"),
        (([90.0] * 3, [90.0]), lambda f: trained.limit(f, ORIGINAL, PREACT), "false"),
        (([90.0], [19.0]), lambda f: trained.limit(f, ORIGINAL, PREACT), "false"),
        (
            (HIGH[:3], LOW[:3], MIXED[:3]),
            lambda f: trained.gain_grows(f, [(PREACT, OTHER), (ORIGINAL, PREACT)]),
            "true",
        ),
        (
            (HIGH[:3], LOW[:3], MIXED[:3]),
            lambda f: trained.gain_grows(f, [(ORIGINAL, PREACT), (PREACT, OTHER)]),
            "false",
        ),
        (
            (HIGH[:3], LOW[:2], MIXED[:3]),
            lambda f: trained.gain_grows(f, [(PREACT, OTHER), (ORIGINAL, PREACT)]),
            "not clear",
        ),
    ],
)
def test_errors_of_runs_decide(errors, call, verdict, tmp_path):
    for trial, each in zip((ORIGINAL, PREACT, OTHER), errors, strict=False):
        write(tmp_path, trial, each)
    found = call(tmp_path)
    assert found.verdict == verdict
    assert f"n = {len(errors[0])}" in found.text or "Gains" in found.text


@pytest.mark.parametrize(
    ("errors", "losses", "verdict"),
    [
        ((LOW, MORE), (MORE, LOW), "true"),
        ((LOW, MORE), (LOW, MORE), "false"),
        ((MORE, LOW), (MORE, LOW), "false"),
        ((LOW, MORE), (LOW, LOW), "not clear"),
        ((LOW, LOW), (MORE, LOW), "not clear"),
        ((LOW, LOW), (LOW, MORE), "false"),
    ],
)
def test_training_losses_decide(errors, losses, verdict, tmp_path):
    for trial, error, loss in zip((PREACT, ORIGINAL), errors, losses, strict=True):
        write(tmp_path, trial, error, loss)
    assert trained.regularises(tmp_path, PREACT, ORIGINAL).verdict == verdict


def test_a_loss_after_a_quarter_of_the_run(tmp_path):
    losses = {PREACT: [3.0, 1.0, 0.1, 0.1], ORIGINAL: [3.0, 2.0, 0.1, 0.1]}
    for trial, (first, *rest) in losses.items():
        for seed in range(4):
            run = record(trial, seed, 1.0, errors=[1.0] * 5)  # 10 to 50 iterations
            values = [9.0, first + rest[0] + seed / 100, *rest]
            curves = {**run.curves, "train_loss": values}
            results.write(tmp_path, dataclasses.replace(run, curves=curves))
    found = trained.higher(tmp_path, ORIGINAL, PREACT, "early loss")
    assert found.verdict == "true"
    assert "ResNet-110, original: 5.015 (5.000 to 5.030), n = 4" in found.text
    assert trained.higher(tmp_path, ORIGINAL, PREACT).verdict == "not clear"


def test_the_best_measured_rates_decide(tmp_path):
    assert trained.rate(tmp_path, 0.1, 0.1).verdict == "unmeasured"
    (tmp_path / "rates").mkdir()
    for layers, losses in {20: {0.1: 0.5, 0.4: 0.2}, 56: {0.1: 0.2, 0.4: None}}.items():
        runs = [{"rate": rate, "seed": 0, "loss": loss} for rate, loss in losses.items()]
        runs = [dict.fromkeys(("depth", "error", "diverged_at", "seconds")) | run for run in runs]
        record = {"format": rates.FORMAT, "network": "preact", "layers": layers, "runs": runs}
        (tmp_path / f"rates/preact-{layers}.json").write_text(json.dumps(record))
    assert trained.rate(tmp_path, 0.2, 0.3, most=50).verdict == "true"
    assert trained.rate(tmp_path, 0.1, 0.1, most=50).verdict == "false"
    assert trained.rate(tmp_path, 0.1, 0.1, least=50).verdict == "true"
    assert trained.rate(tmp_path, 0.3, 0.4).text.endswith("0.4 at 20 layers, 0.1 at 56 layers.")


def test_printed_numbers_decide():
    rows = {"original": 6.61, "full_preactivation": 6.37}
    assert printed.error("2", "ResNet-110", rows).verdict == "true"
    assert printed.error("2", "ResNet-110", rows | {"original": 6.62}).verdict == "false"
    assert printed.error("1", "ResNet-110", {"dropout (dropout 0.5, 1)": 21.0}).verdict == "false"
    assert printed.fail("identity (1, 1)").verdict == "false"
    assert printed.gain_grows(["ResNet-1001", "ResNet-110"]).verdict == "false"
    assert printed.parameters("ResNet-110", 1.9).verdict == "false"


def test_a_condition_counts_only_if_it_matters():
    assert conditional("it is large", True, False, "One.").verdict == "true if"
    assert conditional("it is large", True, True, "One.") == decided(True, "One.")
    assert conditional("it is large", False, True, "One.") == decided(False, "One.")


def test_the_command_keeps_other_findings(tmp_path, capsys):
    main.main(words(f"claims --only gate-10 power-05 power-095 --output {tmp_path}"))
    out = capsys.readouterr().out
    assert "gate-10: true. sigmoid(-10) = 4.54e-05." in out
    assert "3 claims in " in out
    before = check.read(tmp_path)
    assert list(before) == ["power-095", "power-05", "gate-10"]
    main.main(words(f"claims --only chain-sgd --output {tmp_path}"))
    after = check.read(tmp_path)
    assert after.pop("chain-sgd")["verdict"] == "unmeasured"
    assert after == before
    assert (
        f"Not measured: 1 of 1. {tmp_path} lacks finished runs. Give --output the folder results "
        "of the repository, or train the runs: keras-preact reproduce --help lists the tables."
    ) in capsys.readouterr().out

    assert "Did you mean 'gate-10'" in error_of(
        capsys, main.main, words(f"claims --only gate-11 --output {tmp_path}")
    )
    (tmp_path / "claims.json").write_text('{"format": 1}')
    assert "holds no findings of claims" in error_of(
        capsys, main.main, words(f"claims --only gate-10 --output {tmp_path}")
    )
    assert (tmp_path / "claims.json").read_text() == '{"format": 1}'


def test_findings_before_an_interruption_are_kept(tmp_path, monkeypatch, capsys):
    def interrupted(claim, folder):
        if claim.name == "power-05":
            raise KeyboardInterrupt
        return decided(True, "One.")

    monkeypatch.setattr(check.Claim, "find", interrupted)
    with pytest.raises(SystemExit):
        main.main(words(f"claims --only gate-10 power-05 --output {tmp_path}"))
    assert list(check.read(tmp_path)) == ["gate-10"]
