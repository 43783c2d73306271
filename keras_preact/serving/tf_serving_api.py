"""TensorFlow Serving's REST API: what its clients ask for, at the paths and in the
forms they know.
"""

from typing import Any

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_preact.serving import tf_serving_format as form
from keras_preact.serving.errors import NotFound, RequestError, Unavailable
from keras_preact.serving.inference import inference, json_response, leased, version_of


class _ModelName(StringConvertor):
    """A model's name in a path: what stands before the method's colon."""

    regex = "[^/:]+"


register_url_convertor("model", _ModelName())


@inference
async def predict(request: Request, body: bytes, deadline: float) -> Response:
    """Compute a signature's outputs, example by example or as columns, as the request
    has its inputs.
    """
    workers = request.app.state.workers
    with leased(request) as servable:
        call = await workers.run(len(body), form.parse_predict, body, servable.signatures)
        outputs = await servable.predict(call.signature, call.inputs, deadline)
        size = sum(array.nbytes for array in outputs.values())
        content = await workers.run(size, form.dump_predict, outputs, call.by_rows)
    return Response(content, media_type="application/json")


@inference
async def classify(request: Request, body: bytes, deadline: float) -> Response:
    """Name the most probable classes of each example, highest first."""
    with leased(request) as servable:
        call = await request.app.state.workers.run(
            len(body), form.parse_classify, body, servable.signatures
        )
        outputs = await servable.predict(call.signature, call.inputs, deadline)
        content = form.dump_classify(outputs, servable.classes, servable.card["top_k"])
    return Response(content, media_type="application/json")


async def regress(request: Request) -> Response:
    """Refuse: TensorFlow Serving has it for models of another kind."""
    raise RequestError(
        "The models here are classifiers, without a regression: ask for :predict or :classify."
    )


async def unknown_method(request: Request) -> Response:
    """Refuse, and name the methods that there are."""
    raise RequestError(
        "A model has the methods predict and classify. Received: "
        f"{request.path_params['method'][:40]}"
    )


async def model_status(request: Request) -> Response:
    """The states of a model's versions, or of the one that the path names."""
    name, version = request.path_params["name"], version_of(request)
    found = [
        status
        for status in request.app.state.repository.status(name)
        if version in (None, status.version)
    ]
    if not found:
        raise NotFound(f"{name} has no version {version}.")
    return json_response(
        {
            "model_version_status": [
                {
                    "version": str(status.version),
                    "state": status.state,
                    "status": {
                        "error_code": status.error_code,
                        "error_message": status.error_message,
                    },
                }
                for status in found
            ]
        }
    )


async def model_metadata(request: Request) -> Response:
    """The signatures, as TensorFlow describes them."""
    with leased(request) as servable:
        return json_response(
            {
                "model_spec": {
                    "name": servable.name,
                    "signature_name": "",
                    "version": str(servable.version),
                },
                "metadata": {"signature_def": {"signature_def": servable.signature_defs}},
            }
        )


async def models(request: Request) -> Response:
    """Every model, with what a person needs to choose one and send it an image.
    TensorFlow Serving has no such list.
    """
    repository = request.app.state.repository
    return json_response({"models": [_described(repository, name) for name in repository.names()]})


def _described(repository, name: str) -> dict:
    versions = [
        {"version": str(status.version), "state": status.state}
        for status in repository.status(name)
    ]
    about: dict[str, Any] = {
        "name": name,
        "versions": versions,
        "classes": None,
        "input": None,
        "takes_images": False,
    }
    try:
        with repository.lease(name) as servable:
            about["classes"] = len(servable.classes)
            about["input"] = {"shape": servable.signatures[form.DEFAULT_SIGNATURE].inputs[0].shape}
            about["takes_images"] = "predict_bytes" in servable.signatures
    except (NotFound, Unavailable):
        pass  # the states say it
    return about


def _routes(path: str) -> list[Route]:
    methods = {"predict": predict, "classify": classify, "regress": regress}
    return [
        *(
            Route(f"{path}:{method}", endpoint, methods=["POST"])
            for method, endpoint in methods.items()
        ),
        Route(f"{path}:{{method}}", unknown_method, methods=["POST"]),
        Route(path, model_status),
        Route(f"{path}/metadata", model_metadata),
    ]


routes = [
    Route("/v1/models", models),
    *_routes("/v1/models/{name:model}"),
    *_routes("/v1/models/{name:model}/versions/{version:model}"),
]
