"""Serves exported models over HTTP: `python -m keras_preact.serving saved_models`."""

import importlib.util

_missing = [
    name
    for name in ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client")
    if importlib.util.find_spec(name) is None
]
if _missing:
    raise ImportError(f"Serving needs {', '.join(_missing)}: pip install 'keras-preact[serving]'")
