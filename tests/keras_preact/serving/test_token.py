"""With a token, everything but the probes and the page is closed to those who do not
send it.
"""

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

pytest.importorskip("uvicorn")
from tests.keras_preact.serving import fakes  # noqa: E402

PREDICT, INFER = "/v1/models/toy:predict", "/v2/models/toy/infer"
INSTANCES = {"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}
TOKEN = "correct-horse.battery_staple"


@pytest.fixture(scope="module")
def guarded():
    with fakes.serving(token=TOKEN) as running:
        yield running


@pytest.mark.parametrize("path", ["/", "/v2/health/live", "/v2/health/ready"])
def test_probes_and_the_page_need_no_token(guarded, path):
    assert guarded.ask("GET", path).status == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer é",
        f"Bearer {TOKEN} x",
    ],
)
def test_without_the_token_everything_else_is_closed(guarded, header):
    headers = {} if header is None else {"Authorization": header}
    for method, path in [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/v2"),
        ("GET", "/v2/models/toy/ready"),
        ("GET", "/nope"),
        ("GET", "/v2/health/other"),
        ("GET", "//"),
        ("GET", "/static%2F..%2Fv2"),
        ("POST", PREDICT),
        ("POST", INFER),
    ]:
        answer = guarded.ask(method, path, b"x" if method == "POST" else None, headers)
        if path == "/static%2F..%2Fv2":
            assert answer.status == 404  # it is nothing, and open
            continue
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert TOKEN not in answer.body.decode()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_with_the_token_everything_is_open(guarded, scheme):
    headers = {"Authorization": f"{scheme} {TOKEN}"}
    assert guarded.ask("POST", PREDICT, INSTANCES, headers).status == 200
    assert guarded.ask("GET", "/metrics", headers=headers).status == 200
