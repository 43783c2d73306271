"""The benchmark: its arithmetic by hand, its order and limits, and real children on
tiny networks. No test asserts a time.
"""

import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import keras
import pytest

import keras_preact as kp
from tests.training.commands import error_of, files, finish, start, words
from training import cli
from training.benchmark import __main__ as command
from training.benchmark import candidates, child, comparison, health_cost, report, rounds
from training.benchmark.candidates import Candidate, expand, parse, write
from training.benchmark.rounds import Outcome
from training.benchmark.step_time import Step

BACKEND = keras.backend.backend()
TINY = words(f"--backends {BACKEND} --batch 2 --rounds 1 --steps 2 --warmup 1")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestRatios:
    #: In every round b takes twice as long as a, though the machine gets slower; c fails in the
    #: second.
    ROUNDS = (
        {"a": {"s": 1.0}, "b": {"s": 2.0}, "c": {"s": 3.0}},
        {"a": {"s": 10.0}, "b": {"s": 20.0}},
        {"a": {"s": 2}, "b": {"s": 5}},
    )

    def test_by_hand(self):
        def entry(*figures, over):
            keys = ("median", "min", "max")
            ratio = {"over": "a"} | dict(zip(keys, over, strict=True))
            return dict(zip((*keys, "rounds"), figures, strict=True)) | {"ratio": ratio}

        summary = report.summarize(self.ROUNDS, {"a": "a", "b": "a", "c": "a", "d": "a"})
        assert summary == {
            "a": {"s": entry(2, 1, 10, 3, over=(1, 1, 1))},
            "b": {"s": entry(5, 2, 20, 3, over=(2, 2, 2.5))},
            "c": {"s": entry(3, 3, 3, 1, over=(3, 3, 3))},
            "d": {},
        }

    def test_median_of_the_quotients_is_not_the_quotient_of_the_medians(self):
        figures = [{"a": {"s": a}, "b": {"s": b}} for a, b in ((1, 3), (4, 4), (5, 6))]
        entry = report.summarize(figures, {"a": "a", "b": "a"})["b"]["s"]
        assert entry["median"] == 4
        assert entry["ratio"]["median"] == 1.2

    def test_no_ratio_without_the_baseline_of_the_round(self):
        figures = [{"b": {"s": 3.0}} | a for a in ({}, {"a": {"s": 0.0}}, {"a": {"t": 1.0}})]
        assert "ratio" not in report.summarize(figures, {"a": "a", "b": "a"})["b"]["s"]

    def test_table(self):
        """The lines that a person reads, from the outcomes of children."""
        baselines = dict.fromkeys("abcd", "a")
        outcomes = [
            Outcome(
                number,
                label,
                1.0,
                {
                    "jit_compile": label == "a",
                    "figures": {"step_seconds": row["s"], "all_steps": [1.0]},
                },
            )
            for number, figures in enumerate(self.ROUNDS, 1)
            for label, row in figures.items()
        ]
        outcomes += [
            Outcome(2, "c", 1.0, problem="over 300 s"),
            Outcome(1, "d", 1.0, problem="over 300 s"),
        ]
        summary = report.summarize(rounds.figures_of(outcomes, 3), baselines)
        remarks = comparison.remarks(summary, outcomes)
        text = report.table(Step.columns, summary, baselines, ("jit", ""), remarks)
        header, *rows = (" ".join(line.split()) for line in text.splitlines())
        assert header == "candidate step ms ratio of step jit"
        assert rows == [
            "[1] a 2,000.0 (1,000.0 to 10,000.0) baseline yes",
            "[2] b 5,000.0 (2,000.0 to 20,000.0) 2 x [1] (2 to 2.5) no",
            "[3] c 3,000.0 3 x [1] no over 300 s in round 2",
            "[4] d - - - over 300 s",
        ]


class TestCandidates:
    def test_options(self):
        name, options = parse(
            "cifar_resnet164_preact:stacked=true,remat=3,unroll=1,stochastic_depth=0.5,execution=scan,normalization=None"
        )
        assert name == "cifar_resnet164_preact"
        assert list(options.items()) == [
            ("stacked", True),
            ("remat", 3),
            ("unroll", 1),
            ("stochastic_depth", 0.5),
            ("execution", "scan"),
            ("normalization", None),
        ]
        assert options["unroll"] is not True
        assert parse(write(name, options)) == (name, options)
        assert (
            write(name, {"remat": 1, "stacked": False})
            == "cifar_resnet164_preact:remat=1,stacked=false"
        )
        assert parse("dense_resnet6") == ("dense_resnet6", {})
        peer = parse("timm_resnetv2_50:channels_last=true,compile=false")
        assert peer == ("timm_resnetv2_50", {"channels_last": True, "compile": False})

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("cifar_resnet146_preact", "Unknown candidate. Did you mean 'cifar_resnet164_preact'"),
            ("timm_resnet50", "'timm_resnetv2_50'"),
            ("dense_resnet6:remt=1", "Unknown option. Did you mean 'remat'"),
            ("dense_resnet6:remat", "A candidate is NAME:option=value"),
            ("dense_resnet6:dtype=float16", "dtype must be float32 or mixed_bfloat16."),
            ("timm_resnetv2_50:dtype=true", "dtype must be float32 or mixed_bfloat16."),
            ("dense_resnet6:input_shape=3", "input_shape is set by --image-size"),
            ("keras_applications_resnet50v2:depth=3", "Unknown option. Choose one of: dtype."),
            ("timm_resnetv2_50:compiled=true", "Unknown option. Did you mean 'compile'"),
            ("timm_resnetv2_50:depth=3", "Choose one of: channels_last, compile, dtype."),
            ("timm_resnetv2_50:compile=1", "compile of timm_resnetv2_50 must be true or false"),
        ],
    )
    def test_unknown(self, text, message):
        with pytest.raises(cli.UserError) as raised:
            parse(text)
        assert message in str(raised.value)
        assert f"Received: {text!r}" in str(raised.value)

    def test_variants(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        models = [
            "dense_resnet6",
            "dense_resnet12:stacked=true",
            "timm_resnetv2_50",
            "keras_applications_resnet50v2",
        ]
        rows = expand(models, ["tensorflow", "torch"], [{"stacked": True}, {"stacked": False}])
        keras_rows = [
            "dense_resnet6:stacked=true",
            "dense_resnet6:stacked=false",
            "dense_resnet12:stacked=true",
        ]
        last = "keras_applications_resnet50v2"
        assert [row.label for row in rows] == [
            *(f"tensorflow/{name}" for name in [*keras_rows, last]),
            *(f"torch/{name}" for name in [*keras_rows, "timm_resnetv2_50", last]),
        ]

    def test_peer_without_its_backend(self, monkeypatch):
        # JAX need not be installed
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        with pytest.raises(
            cli.UserError,
            match=r"timm_resnetv2_50 runs on torch\. Received: --backends tensorflow jax",
        ):
            expand(["timm_resnetv2_50"], ["tensorflow", "jax"], [{}])

    @pytest.mark.parametrize(
        ("model", "backend", "missing", "extra"),
        [
            ("keras_hub_resnet50v2", "tensorflow", "keras_hub", "benchmark"),
            ("timm_resnetv2_50", "torch", "timm", "benchmark"),
            ("dense_resnet6", "jax", "jax", "jax"),
        ],
    )
    def test_missing_package(self, model, backend, missing, extra, monkeypatch):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == missing else name
        )
        with pytest.raises(
            cli.UserError,
            match=rf"not installed: pip install -c constraints/tested.txt -e '\.\[{extra}\]'",
        ):
            expand([model], [backend], [{}])

    def test_baselines(self):
        rows = [
            Candidate(backend, "dense_resnet6", {"remat": k})
            for backend in ("jax", "torch")
            for k in (2, 3)
        ]
        first = {row.label: f"{row.backend}/dense_resnet6:remat=2" for row in rows}
        assert comparison.baselines_of(rows, None) == first
        assert comparison.baselines_of(rows, "dense_resnet6:remat=2") == first
        assert set(comparison.baselines_of(rows, "torch/dense_resnet6:remat=3").values()) == {
            "torch/dense_resnet6:remat=3"
        }
        for unknown in ("dense_resnet6", "tensorflow/dense_resnet6:remat=2", "first"):
            with pytest.raises(cli.UserError, match="--baseline is none of the candidates"):
                comparison.baselines_of(rows, unknown)


class TestRounds:
    def test_candidates_take_turns(self, monkeypatch):
        started = []

        def pretend(question, candidate):
            started.append(candidate.label)
            if candidate.name == "b" and len(started) > 3:
                return -9, "", ""
            if candidate.name == "c":
                return 1, "", "Traceback\nKeyError: 'x'\n"
            return 0, '{"figures": {}}\n', ""

        monkeypatch.setattr(rounds, "_child", pretend)
        rows = [Candidate("jax", "a"), Candidate("torch", "b"), Candidate("torch", "c")]
        told = []
        outcomes = rounds.run(Step(rounds=3, limit=10), rows, told.append)
        a, b, c = (row.label for row in rows)
        assert started == [a, b, c, a, b, a]  # a candidate that failed is not measured again
        assert told == outcomes
        assert [(outcome.round, outcome.label, outcome.problem) for outcome in outcomes] == [
            (1, a, None),
            (1, b, None),
            (1, c, "failed: KeyError: 'x'"),
            (2, a, None),
            (2, b, "ended by SIGKILL, perhaps for want of memory"),
            (3, a, None),
        ]

    def test_mistake_of_the_user_ends_the_run(self, monkeypatch):
        monkeypatch.setattr(rounds, "_child", lambda *_: (2, "", "a note\nerror: no such remat\n"))
        with pytest.raises(cli.UserError, match=r"^jax/a: no such remat$"):
            rounds.run(Step(), [Candidate("jax", "a")], print)

    def test_limit(self, monkeypatch):
        """A real child is killed, and what it started: run() would wait for that to
        close the pipe, 600 seconds.
        """
        begun = []
        popen = subprocess.Popen

        def slow(arguments, **options):
            code = (
                "import subprocess, sys; "
                "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
            )
            begun.append(popen([arguments[0], "-c", code], **options))
            return begun[0]

        monkeypatch.setattr(subprocess, "Popen", slow)
        question = Step(rounds=2, limit=1.5)
        outcomes = rounds.run(question, [Candidate(BACKEND, "a")], lambda outcome: None)
        assert [outcome.problem for outcome in outcomes] == ["over 1.5 s"]
        assert begun[0].returncode == -9


class TestRealRuns:
    @pytest.fixture
    def in_this_process(self, monkeypatch):
        """What the other commands measure, without the imports of a child;
        `test_compile` has a real one.
        """

        def measured(question, candidate):
            assert candidate.backend == BACKEND
            return 0, json.dumps(child.measure(question, candidate)) + "\n", ""

        monkeypatch.setattr(rounds, "_child", measured)

    def measure(self, name, *options) -> dict:
        command.main([name, *TINY, "--output", "figures.json", *words(*options)])
        return json.loads(Path("figures.json").read_text())

    def test_compile(self, capsys, empty_folder):
        network = "digits_resnet8_preact:width_factor=0.25"
        options = f"--models {network} --variants stacked --image-size 4"
        described = self.measure("compile", options)
        label = f"{BACKEND}/digits_resnet8_preact:stacked=true,width_factor=0.25"
        assert files(empty_folder) == ["figures.json"]
        assert list(described) == [
            *("command", "settings", "about", "order", "started", "machine"),
            *("candidates", "outcomes", "summary"),
        ]
        assert described["settings"]["image_size"] == 4
        assert described["machine"]["cpu"].endswith(f"{os.cpu_count()} cores")
        [(name, candidate)] = described["candidates"].items()
        assert name == candidate["baseline"] == label
        assert {"python", "keras", "numpy", BACKEND} <= candidate["versions"].keys()
        assert candidate["versions"]["keras"] == keras.__version__
        assert candidate["parameters"] == 4934
        [outcome] = described["outcomes"]
        figures = outcome["result"]["figures"]
        assert len(figures.pop("all_steps")) == 2
        assert figures["compile_seconds"] == figures["first_step_seconds"] - figures["step_seconds"]
        ratio = {"over": label, "median": 1, "min": 1, "max": 1}
        assert described["summary"][label]["step_seconds"]["ratio"] == ratio
        check(figures)
        printed = capsys.readouterr()
        assert "The children of a round run one after another" in printed.out
        assert f"[1]  {label}" in printed.out
        assert printed.out.endswith("Written: figures.json\n")
        assert printed.err.startswith(f"round 1: {label}: ")

    def test_step(self, in_this_process):
        figures = self.only_figures("step", "--models dense_resnet6 --mode inference")
        assert len(figures.pop("all_steps")) == 2
        assert figures["images_per_second"] == 2 / figures["step_seconds"]
        check(figures)

    def test_dtypes(self, in_this_process, monkeypatch, capsys):
        """The option of a candidate overrides --dtype, in the same rounds."""
        policies = []
        measure = Step.measure

        def watched(question, subject):
            policies.append((subject.model.units[0].compute_dtype, question.dtype))
            return measure(question, subject)

        monkeypatch.setattr(Step, "measure", watched)
        policy = keras.config.dtype_policy()
        try:
            found = self.measure(
                "step", "--models dense_resnet6 dense_resnet6:dtype=mixed_bfloat16"
            )
        finally:
            keras.config.set_dtype_policy(policy)
        assert policies == [("float32", "float32"), ("bfloat16", "mixed_bfloat16")]
        first, second = f"{BACKEND}/dense_resnet6", f"{BACKEND}/dense_resnet6:dtype=mixed_bfloat16"
        assert {row["baseline"] for row in found["candidates"].values()} == {first}
        assert found["summary"][second]["step_seconds"]["ratio"]["over"] == first
        assert "batch 2, float32 if not given, 1 round" in capsys.readouterr().out

    def test_memory(self, in_this_process):
        figures = self.only_figures("memory", "--models dense_resnet6 --remat 2")
        assert figures.keys() >= {"resident_increase_bytes", "peak_resident_bytes"}
        assert ("xla_temporary_bytes" in figures) == (BACKEND == "jax")
        assert figures.pop("resident_increase_bytes") >= 0
        check(figures)

    def test_optimizer(self, in_this_process):
        figures = self.only_figures("optimizer", "--models dense_resnet12 --variants stacked")
        assert figures["variables"] == len(
            kp.create_model("dense_resnet12", stacked=True).trainable_variables
        )
        assert len(figures.pop("all_steps")) == 2
        check(figures)

    def test_health(self, in_this_process, capsys):
        figures = self.only_figures("health", "--models dense_resnet6 --interval 2 --steps 4")
        pairs = figures.pop("all_steps")
        assert len(pairs) == health_cost.PAIRS
        assert figures["watched_over_plain"] == statistics.median(
            watched / plain for plain, watched in pairs
        )
        assert figures["step_seconds"] == statistics.median(plain for plain, _ in pairs)
        check(figures)
        assert "with / without" in capsys.readouterr().out

    def test_checkpoint(self, in_this_process):
        figures = self.only_figures("checkpoint", "--models dense_resnet6")
        assert len(figures.pop("all_saves")) == 2
        check(figures)

    @pytest.mark.soak
    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
    def test_sigterm_ends_the_children(self, empty_folder):
        options = f"--backends {BACKEND} --models digits_resnet20_preact --rounds 1 --steps 100000"
        process = start("-m", "training", "benchmark", "step", *words(options), cwd=empty_folder)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            while not (children := listed.read_text().split()):
                assert process.poll() is None
                time.sleep(0.1)
            time.sleep(1)  # it is started
            process.terminate()
        finally:
            status, _, err = finish(process)
        assert status == 128 + signal.SIGTERM, err
        assert not any(Path("/proc", child).exists() for child in children)

    @pytest.mark.soak
    @pytest.mark.skipif(
        not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
        reason="needs two cores that a process can be bound to",
    )
    def test_processes(self, capsys):
        options = words(f"--backends {BACKEND} --rounds 2 --warmup 1 --steps 2")
        command.main(["processes", *options, "--output", "figures.json"])
        found = json.loads(Path("figures.json").read_text())
        one = f"{BACKEND}/one"
        labels = [one, f"{BACKEND}/synchronized", f"{BACKEND}/per_replica"]
        assert [list(figures) for figures in found["rounds"]] == [labels, labels]
        for label in labels:
            for figures in found["rounds"]:
                check(figures[label])
            rates = [figures[label]["steps_per_second"] for figures in found["rounds"]]
            ratios = [
                rate / figures[one]["steps_per_second"]
                for rate, figures in zip(rates, found["rounds"], strict=True)
            ]
            summary = found["summary"][label]["steps_per_second"]
            assert summary["median"] == statistics.median(rates)
            assert summary["ratio"]["over"] == one
            assert summary["ratio"]["median"] == pytest.approx(statistics.median(ratios))
        assert "two cores of" in capsys.readouterr().out

    def only_figures(self, *arguments) -> dict:
        [outcome] = self.measure(*arguments)["outcomes"]
        return outcome["result"]["figures"]


def check(figures: dict) -> None:
    for name, value in figures.items():
        assert math.isfinite(value), name
        assert value > 0, name


class TestCommandLine:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("stp", "Unknown command of benchmark: 'stp'. Did you mean 'step'"),
            ("step --models dense_resnet7", "Did you mean 'dense_resnet6'"),
            ("step --rounds 0", "--rounds must be positive. Received: 0"),
            ("step --limit nan", "--limit must be a positive number of seconds. Received: nan"),
            ("step --output there/is/none.json", "there is no directory there/is"),
            ("step --baseline dense_resnet6", "--baseline is none of the candidates."),
            ("step --models", "Give at least one of --models"),
            ("health --interval 0", "--interval must be positive. Received: 0"),
            ("memory --remat 0", "--remat takes false, true or a number of units. Received: 0"),
        ],
    )
    def test_wrong_option(self, options, message, capsys, empty_folder):
        name, *more = words(options)
        assert message in error_of(capsys, command.main, [name, "--backends", BACKEND, *more])
        assert list(empty_folder.iterdir()) == []

    @pytest.mark.parametrize("name", command.COMMANDS)
    def test_help(self, name, capsys):
        with pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0
        own = {
            "input": "--images",
            "import": "--rounds",
            "very-deep": "--remat",
            "distribution": "--steps",
            "processes": "--batch-norms",
            "serving": "--engines",
        }
        assert own.get(name, "--limit") in capsys.readouterr().out


#: Name to trainable parameters, those of ResNet-50 v2 in each package and of the paper's networks.
PARAMETERS = {
    "keras_applications_resnet50v2": 25_568_360,
    "kp_applications_resnet50v2": 25_568_360,
    "keras_hub_resnet50v2": 25_549_352,
    "timm_resnetv2_50": 25_549_352,
    "torch_resnet_cifar20": 269_722,
    "torch_resnet_cifar56": 853_018,
    "torch_resnet_cifar110": 1_727_962,
}


_MAKE_PEERS = """
import json, sys, traceback
from training.benchmark import subjects
from training.benchmark.candidates import Candidate
from training.benchmark.step_time import Step
for name in json.loads(sys.argv[2]):
    try:
        subject = subjects.make(Candidate(sys.argv[1], name), Step(batch=2, image_size=32))
        print(name, subject.parameters, *subject.inference_step().shape)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def peers_made(tmp_path_factory):
    """The lines of a process of their own, and its stderr: what these packages import,
    and warn of, is theirs.
    """
    names = json.dumps([name for name in candidates.PEERS if not missing(name)])
    child = start("-c", _MAKE_PEERS, BACKEND, names, cwd=tmp_path_factory.mktemp("peers"))
    status, out, err = finish(child)
    assert status == 0, err
    return out.splitlines(), err


def missing(name: str) -> str:
    """Return why a peer cannot be made here, nothing where it can."""
    peer = candidates.PEERS[name]
    if BACKEND not in peer.backends:
        return f"{name} does not run on {BACKEND}"
    return (
        "needs the extra benchmark"
        if peer.package and importlib.util.find_spec(peer.package[0]) is None
        else ""
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", candidates.PEERS)
def test_peers(name, peers_made):
    if why := missing(name):
        pytest.skip(why)
    lines, err = peers_made
    assert f"{name} {PARAMETERS[name]} 2 {candidates.PEERS[name].classes}" in lines, err
