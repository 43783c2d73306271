"""Serves exported models over HTTP: `python -m keras_preact.serving saved_models`.

The way of a request:

1. `gate`: its host and token, its body, its deadline; every error becomes JSON here.
2. `tf_serving_api` or `open_inference_api`: from JSON to a checked array, and back, with
   `tensors`.
3. `repository`: lends a version of the model, a `servable`.
4. `servable`: decodes images, each by itself; `batching` computes them with those of
   other requests, on one of the `engines`.

`loading` makes a servable from its folder. `app` puts all of it together, `server` and
`ray_serve` run it.
"""
