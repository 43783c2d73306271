"""The benchmark of serving: its client against servers that are known, its arithmetic,
and all of it with a tiny network.
"""

import asyncio
import contextlib
import json
import math
import re

import numpy as np
import pytest

from tests.training.commands import error_of, words
from training.benchmark import __main__ as benchmark
from training.benchmark.serving import cells, client, exports, memory, over_http, suite, verdict
from training.benchmark.serving.workload import Options
from training.cli import UserError

REQUEST = b"POST /x HTTP/1.1\r\nContent-Length: 5000\r\n\r\n" + bytes(range(250)) * 20
MODEL = "imagenet_resnet50_preact"
#: As candidates stand in README's table.
NAME = re.compile(r"[\w/:=,]+")


class KnownServer:
    """Reads requests of one length, checks them, and answers each a moment later with
    the next of `statuses`, in pieces.
    """

    def __init__(self, *statuses, piece=7, seconds=0.01):
        self.statuses, self.piece, self.seconds = statuses, piece, seconds
        self.requests = self.connections = self.at_once = self.most_at_once = 0

    async def serve(self, reader, writer):
        self.connections += 1
        with (
            contextlib.closing(writer),
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
        ):
            while True:
                assert await reader.readexactly(len(REQUEST)) == REQUEST
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                await asyncio.sleep(self.seconds)
                status = self.statuses[self.requests % len(self.statuses)]
                self.requests += 1
                self.at_once -= 1
                if status is None:
                    return
                answer = (
                    f"HTTP/1.1 {status} Word\r\ncontent-LENGTH: 30\r\nx-200: 200 \r\n\r\n".encode()
                    + b"\r\n\r\nHTTP/1.1 2" * 2
                )
                answer += b"!" * 2
                for i in range(0, len(answer), self.piece):
                    writer.write(answer[i : i + self.piece])
                    await writer.drain()

    def measure(self, **options):
        async def both():
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            async with server:
                return await client.measure(server.sockets[0].getsockname()[1], REQUEST, **options)

        return asyncio.run(asyncio.wait_for(both(), 60))


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 5), (4, 21), (8, 3)])
def test_the_client_keeps_every_connection_busy_with_one_request(concurrency, requests):
    server = KnownServer(200)
    found = server.measure(concurrency=concurrency, seconds=60, requests=requests)
    assert (found["requests"], found["refused"]) == (requests, 0)
    assert server.requests == concurrency + requests  # one each is not measured
    assert (server.connections, server.most_at_once) == (concurrency, concurrency)
    assert 1e3 * server.seconds <= found["p50_ms"] <= found["p99_ms"]
    assert found["requests_per_second"] <= concurrency / server.seconds
    assert 0 <= found["client_cpu_share"] <= 1.5


def test_the_client_ends_when_its_time_is_over_and_waits_for_the_last_answers():
    server = KnownServer(200)
    found = server.measure(concurrency=3, seconds=0.1)
    assert server.requests == 3 + found["requests"]
    assert server.at_once == 0


def test_the_client_counts_refused_requests_apart():
    found = KnownServer(200, 200, 503).measure(concurrency=1, seconds=60, requests=9)
    assert (found["requests"], found["refused"]) == (6, 3)


def test_the_client_measures_nothing_without_answers():
    with pytest.raises(
        ValueError, match=r"No request was answered with 200. Received: HTTP/1.1 503 Word"
    ):
        KnownServer(503).measure(concurrency=1, seconds=60, requests=2)
    with pytest.raises(ConnectionError):
        KnownServer(200, 200, None).measure(concurrency=1, seconds=60, requests=9)


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101])
def test_percentile_is_the_nearest_rank(n):
    values = np.random.default_rng(n).permutation(n) * 0.5
    for share in (0.01, 0.5, 0.99, 1.0):
        found = client.percentile(list(values), share)
        assert np.mean(values <= found) >= share > np.mean(values < found)


def test_the_growth_of_memory_is_that_of_the_quarters_medians():
    mib = 2**20
    first, last = (100, 99, 900, 100, 100), (102, 103, 1, 104, 102)
    samples = [n * mib for n in (*first, *[150] * 10, *last)]
    assert memory.growth(samples) == pytest.approx(
        {"growth_mib": 2, "growth_percent": 2, "resident_mib": 102}
    )
    assert memory.growth([mib, mib]) == {"growth_mib": 0, "growth_percent": 0, "resident_mib": 1}


def rounds_of(rates):
    """Return rounds of the server's part: with batching, and over it without, after a
    loop of 10 requests/s.
    """
    loop = cells.label("server", MODEL, "loop", precision="bfloat16")
    on, off = (
        cells.label("server", MODEL, "tensorflow", batching=batching, concurrency=16)
        for batching in ("on", "off")
    )
    figures = ({loop: 10.0, on: with_it, off: without} for with_it, without in rates)
    return [
        over_http.compare(
            {name: {"over": loop, "requests_per_second": rate} for name, rate in one.items()}
        )
        for one in figures
    ], on


def test_ratios_are_of_figures_of_the_same_round():
    rounds, on = rounds_of([(30.0, 10.0), (20.0, 40.0), (50.0, 25.0)])
    summary = verdict.summarize(rounds)[on]
    assert summary["over_no_batching"] == {"median": 2.0, "min": 0.5, "max": 3.0, "rounds": 3}
    assert summary["requests_per_second"]["ratio"]["median"] == 3.0
    assert (
        summary["requests_per_second"]["ratio"]["over"] == f"server/{MODEL}/loop:precision=bfloat16"
    )


def test_demands_are_held_to_the_medians():
    rounds, on = rounds_of([(30.0, 40.0)])
    [demand] = verdict.judge(verdict.summarize(rounds), amx=True)
    assert (demand["label"], demand["value"], demand["met"]) == (on, 0.75, False)

    def direct(engine, precision, rate):
        return {
            cells.label("direct", model, what, precision=p, batch=1): {
                "over": "direct/keras_applications_resnet50v2/loop:precision=float32,batch=1",
                "images_per_second": images,
            }
            for model, what, p, images in (
                ("keras_applications_resnet50v2", "loop", "float32", 10.0),
                (MODEL, engine, precision, rate),
            )
        }

    def met(rate, **options):
        return [one["met"] for one in verdict.judge(verdict.summarize([direct(*rate)]), **options)]

    assert met(("tensorflow", "bfloat16", 12.0), amx=False) == [True]
    assert met(("tensorflow", "bfloat16", 11.9), amx=False) == [False]
    assert met(("tensorflow", "float32", 90.0), amx=False) == []
    assert met(("openvino", "bfloat16", 31.0), amx=True) == [True]
    assert met(("openvino", "bfloat16", 29.0), amx=True) == [False]
    assert met(("openvino", "bfloat16", 29.0), amx=False) == [None]


def test_every_demand_is_on_a_candidate_that_the_command_measures_by_itself():
    options = Options()
    assert set(verdict.COLUMNS) == {*suite.PARTS, "client"}
    for demand in verdict.DEMANDS:
        part, model, what = demand.label.split("/")
        assert NAME.fullmatch(demand.label)
        assert model in options.models
        assert part in options.parts
        told = dict(pair.split("=") for pair in what.partition(":")[2].split(","))
        assert int(told.get("batch", 1)) in options.batches
        assert int(told.get("concurrency", 16)) in options.concurrency
        assert told.get("precision", options.precision) == options.precision
        assert part != "memory" or model == options.models[0]
    assert options.usual_concurrency == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--models cifar_resnet20", r"Did you mean .*'cifar_resnet20_preact'"),
        ("--models keras_applications_resnet50v2", r"--models takes registered models"),
        ("--concurrency 1 0", r"--concurrency must be positive. Received: \(1, 0\)"),
        ("--engines tensorflow tensorflow", r"--engines must be given at least one value, each"),
        ("--seconds inf", r"--seconds must be positive. Received: inf"),
        ("--memory-seconds 0", r"--memory-seconds must be positive"),
        ("--output none/here.json", r"--output: there is no directory none"),
    ],
)
def test_options_that_do_not_fit(arguments, message, capsys):
    assert re.search(message, error_of(capsys, benchmark.main, ["serving", *words(arguments)]))


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch):
    rounds, on = rounds_of([(30.0, 10.0), (20.0, 40.0)])

    def broken(options, folder):
        yield rounds[0]
        raise UserError("The second round failed.")

    monkeypatch.setattr(suite, "PARTS", {"server": broken})
    monkeypatch.setattr(exports, "write", lambda *_: None)
    output = tmp_path / "serving.json"
    with pytest.raises(UserError, match="second round"):
        suite.run(Options(parts=("server",), output=output))
    written = json.loads(output.read_text())
    assert written["rounds"] == {"server": rounds[:1]}
    assert written["summary"][on]["requests_per_second"]["median"] == 30.0


@pytest.mark.soak
def test_all_parts_measure_a_tiny_network(tmp_path, capsys):
    tiny = "digits_resnet8_preact:width_factor=1"
    options = Options(
        models=(tiny,),
        engines=("tensorflow",),
        concurrency=(1, 3),
        batches=(2,),
        rounds=2,
        seconds=0.05,
        requests=60,
        output=tmp_path / "serving.json",
    )
    found = suite.run(options)
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "serving.json").read_text())
    assert written["summary"] == found["summary"]
    assert {part: len(rounds) for part, rounds in written["rounds"].items()} == {
        "direct": 2,
        "server": 2,
        "memory": 1,
    }
    assert written["machine"]["usable_cores"] >= 1
    assert {"tensorflow", "starlette", "openvino", "python"} <= written["versions"].keys()

    name = cells.label
    plain = name("server", tiny, "loop", precision="bfloat16")
    over = {
        name("direct", tiny, what, precision=precision, batch=2): name(
            "direct", tiny, "loop", precision="float32", batch=2
        )
        for what in ("loop", "tensorflow")
        for precision in ("float32", "bfloat16")
    }
    over |= {
        name("client", tiny, "trivial", concurrency=n): name(
            "client", tiny, "trivial", concurrency=n
        )
        for n in (1, 3)
    }
    over |= {
        name("server", tiny, "tensorflow", batching=batching, concurrency=n): plain
        for batching in ("on", "off")
        for n in (1, 3)
    }
    over |= {
        name("server", tiny, "tensorflow", batching="on", concurrency=3, input=kind): plain
        for kind in ("jpeg", "small_jpeg", "small_png")
    }
    alone = name("server", tiny, "tensorflow", batch=over_http.ENGINE_BATCH)
    over[alone] = plain
    growth = name("memory", tiny, "tensorflow", concurrency=3)
    assert written["summary"].keys() == {plain, growth, *over}
    served = written["rounds"]["server"]
    for label, figures in written["summary"].items():
        assert NAME.fullmatch(label)
        assert f"| `{label.partition('/')[2]}` |" in printed
        assert figures.get("refused", {"max": 0})["max"] == 0
        if label == growth:
            continue
        rate = "images_per_second" if label.startswith("direct/") else "requests_per_second"
        of = over.get(label, plain)
        pairs = [
            (one[label][rate], one[of][rate])
            for rounds in written["rounds"].values()
            for one in rounds
            if label in one
        ]
        assert len(pairs) == 2
        assert figures[rate]["ratio"]["over"] == of
        assert figures[rate]["ratio"]["median"] == pytest.approx(
            sum(mine / its for mine, its in pairs) / 2
        )
        assert 0 < figures["p50_ms"]["min"] <= figures["p99_ms"]["max"]
        if label.startswith("server/") and "concurrency" in label:
            shares = [one[label]["cpu_ms"] / one[alone]["cpu_ms"] for one in served]
            assert figures["over_engine"]["median"] == pytest.approx(sum(shares) / 2)
    [watched] = written["rounds"]["memory"]
    samples = watched[growth]["resident_bytes"]
    assert watched[growth]["requests"] == 60
    assert len(samples) == 1 + memory.SAMPLES
    assert all(size > 50 * 2**20 for size in samples)
    assert math.isfinite(written["summary"][growth]["growth_percent"]["median"])
