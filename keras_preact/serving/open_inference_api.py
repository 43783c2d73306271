"""The Open Inference Protocol, version 2, over HTTP: the API of KServe and Triton."""

import importlib.metadata

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_preact.serving import open_inference_format as form
from keras_preact.serving.errors import NotFound, RequestError, Unavailable
from keras_preact.serving.inference import inference, json_response, leased

HEADER = "Inference-Header-Content-Length"


@inference
async def infer(request: Request, body: bytes, deadline: float) -> Response:
    """Compute the outputs that are asked for; tensors are JSON, or bytes behind it."""
    length = request.headers.get(HEADER)
    if length is not None and not (length.isascii() and length.isdecimal() and len(length) <= 18):
        raise RequestError(f"{HEADER} must be the length of the JSON, a whole number.")
    workers = request.app.state.workers
    with leased(request) as servable:
        call = await workers.run(
            len(body),
            form.parse,
            body,
            None if length is None else int(length),
            servable.signatures,
        )
        outputs = await servable.predict(call.signature, call.inputs, deadline)
        size = sum(outputs[name].nbytes for name in call.outputs)
        content, head = await workers.run(
            size, form.dump, call, outputs, servable.name, servable.version
        )
    if head is None:
        return Response(content, media_type="application/json")
    return Response(content, media_type="application/octet-stream", headers={HEADER: str(head)})


async def server_metadata(request: Request) -> Response:
    """The server's name, version and extensions of the protocol."""
    try:
        version = importlib.metadata.version("keras-preact")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"  # run from its source tree
    return json_response(
        {"name": "keras-preact", "version": version, "extensions": ["binary_tensor_data"]}
    )


async def live(request: Request) -> Response:
    """200 as long as the process answers."""
    return json_response({"live": True})


async def ready(request: Request) -> Response:
    """503 until every model can be asked, and from when the server is told to stop."""
    state = request.app.state
    is_ready = not state.stopping and state.repository.ready()
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


async def model_metadata(request: Request) -> Response:
    """The default signature's tensors, where clients look for a model's; under
    `signatures` those of each.
    """
    with leased(request) as servable:
        versions = [
            str(status.version)
            for status in request.app.state.repository.status(servable.name)
            if status.state == "AVAILABLE"
        ]
        signatures = {
            name: form.describe(signature) for name, signature in servable.signatures.items()
        }
        about = {"name": servable.name, "versions": versions, "platform": "tensorflow_savedmodel"}
        return json_response(
            about | signatures[form.DEFAULT_SIGNATURE] | {"signatures": signatures}
        )


async def model_ready(request: Request) -> Response:
    """200 if the model, or the version that the path names, can be asked."""
    try:
        with leased(request) as servable:
            return json_response({"name": servable.name, "ready": True})
    except (NotFound, Unavailable) as error:
        return json_response(
            {"name": request.path_params["name"], "ready": False, "error": error.message},
            error.status,
        )


def _routes(path: str) -> list[Route]:
    return [
        Route(path, model_metadata),
        Route(f"{path}/ready", model_ready),
        Route(f"{path}/infer", infer, methods=["POST"]),
    ]


routes = [
    Route("/v2", server_metadata),
    Route("/v2/health/live", live),
    Route("/v2/health/ready", ready),
    *_routes("/v2/models/{name}"),
    *_routes("/v2/models/{name}/versions/{version}"),
]
