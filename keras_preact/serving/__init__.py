"""Serve exported models over HTTP: `python -m keras_preact.serving saved_models`.

A request passes through these modules:

1. `gate` checks its host and token, reads its body, and cancels it at its deadline.
   Every error becomes JSON here.
2. `tf_serving_api` or `open_inference_api` turns its JSON into a checked array, and the
   outputs into JSON, with `tensors`.
3. `repository` lends a version of the model, a `servable`.
4. `servable` decodes images with `decoding` and computes them with `batching`, on one of
   the `engines`: each is a `pool` of threads that takes items of several requests at once.

`loading` makes a servable from its folder. `app` puts everything together; `server` and
`ray_serve` run the app.
"""
