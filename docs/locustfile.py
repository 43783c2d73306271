r"""Test a server under load through TensorFlow Serving's REST API, one image per request.

    pip install locust
    locust -f docs/locustfile.py --headless --users 16 --spawn-rate 16 --run-time 30s \
        --host http://127.0.0.1:8501 --model cifar10_resnet20 --shape 32 32 3

Each user waits for its answer before it sends the next request, so `--users` is the number of
requests at once. Locust prints requests per second and percentiles of the latency; `--csv NAME`
and `--json` write them. The client runs on the server's machine: use `--processes 2` if it
needs a whole core.
"""

import json
import random

from locust import FastHttpUser, events, task


@events.init_command_line_parser.add_listener
def _add_options(parser):
    parser.add_argument("--model", required=True, help="Name under which the model is served.")
    parser.add_argument("--shape", type=int, nargs=3, default=[32, 32, 3], help="Image shape.")


def _image(height: int, width: int, channels: int) -> list:
    pixel = random.Random(0).randrange
    return [[[pixel(256) for _ in range(channels)] for _ in range(width)] for _ in range(height)]


class Client(FastHttpUser):
    """Sends the same random image again and again."""

    def on_start(self):
        options = self.environment.parsed_options
        self.path = f"/v1/models/{options.model}:predict"
        self.body = json.dumps({"instances": [_image(*options.shape)]}).encode()

    @task
    def predict(self):
        self.client.post(self.path, data=self.body, headers={"Content-Type": "application/json"})
