"""What Triton's clients ask for beyond the Open Inference Protocol: the configuration and the
statistics of a model, and the index of all models.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_preact.serving import tensors
from keras_preact.serving.batching import Duration
from keras_preact.serving.errors import RequestError
from keras_preact.serving.gate import json_response, leased
from keras_preact.serving.servable import Servable
from keras_preact.serving.tensors import DEFAULT_SIGNATURE, TensorSpec

#: Triton's word for each state of a version; it is UNAVAILABLE in the others.
_STATES = {"AVAILABLE": "READY", "LOADING": "LOADING", "UNLOADING": "UNLOADING"}


async def model_config(request: Request) -> Response:
    """The tensors of the default signature, without the axis of the batch, and the size of
    the largest batch.
    """
    with leased(request) as servable:
        signature = servable.signatures[DEFAULT_SIGNATURE]
        return json_response(
            {
                "name": servable.name,
                "platform": "tensorflow_savedmodel",
                "max_batch_size": servable.batcher.max_batch_size,
                "input": [_described(signature.input)],
                "output": [_described(spec) for spec in signature.outputs.values()],
            }
        )


def _described(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.dtype == "string" else spec.dtype.upper().replace("FLOAT", "FP")
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": spec.lengths[1:]}


async def model_statistics(request: Request) -> Response:
    """The statistics of the version that the path names, or of the highest one."""
    with leased(request) as servable:
        return json_response({"model_stats": [_statistics(servable)]})


async def all_statistics(request: Request) -> Response:
    """The statistics of every version that answers requests."""
    servables = request.app.state.repository.servables()
    return json_response({"model_stats": [_statistics(one) for one in servables]})


def _statistics(servable: Servable) -> dict[str, Any]:
    measured, batcher = servable.statistics, servable.batcher
    return {
        "name": servable.name,
        "version": str(servable.version),
        "last_inference": round(1000 * measured.last),
        "inference_count": batcher.rows,
        "execution_count": batcher.computed.count,
        "inference_stats": {
            "success": _duration(measured.success),
            "fail": _duration(measured.fail),
            "compute_infer": _duration(batcher.computed),
        },
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": round(1e9 * duration.seconds)}


async def repository_index(request: Request) -> Response:
    """Every version of every model, with its state; with `{"ready": true}`, those that
    answer requests.
    """
    async with request.app.state.admission.admit(request) as body:
        given = tensors.fields(tensors.parse_json(body or b"{}"), ("ready",), "")
    only_ready = given.get("ready", False)
    if not isinstance(only_ready, bool):
        raise RequestError(
            f"`ready` must be true or false. Received: {tensors.described(only_ready)}"
        )
    repository = request.app.state.repository
    index = [
        {
            "name": name,
            "version": str(one.version),
            "state": _STATES.get(one.state, "UNAVAILABLE"),
            "reason": one.error_message,
        }
        for name in repository.names()
        for one in repository.status(name)
    ]
    return json_response([row for row in index if row["state"] == "READY" or not only_ready])


def _routes(path: str) -> list[Route]:
    return [Route(f"{path}/config", model_config), Route(f"{path}/stats", model_statistics)]


routes = [
    Route("/v2/models/stats", all_statistics),
    *_routes("/v2/models/{name}"),
    *_routes("/v2/models/{name}/versions/{version}"),
    Route("/v2/repository/index", repository_index, methods=["POST"]),
]
