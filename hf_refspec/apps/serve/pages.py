"""What the server says of itself: at `/`, and to `/docs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_PLACE = "#/components/schemas/"


def start_page(app: FastAPI, model: str, url: str) -> dict[str, Any]:
    """What is served, and a line to try it with."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    return {
        "about": "hf_refspec: OpenAI's interface for one model, with lossless drafts",
        "model": model,
        "base_url": f"{url}v1",
        "endpoints": [f"{method} {each.path}" for each in routes for method in each.methods or ()],
        "docs": f"{url}docs",
        "try": f"curl {url}v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'",
    }


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's body, which the route reads itself, for its documentation."""
    schema = {"$ref": _PLACE + kind.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, kinds: Sequence[type[BaseModel]]) -> None:
    """Adds the bodies' schemas to the app's own."""
    schema = app.openapi()
    _, bodies = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=_PLACE + "{model}"
    )
    schema.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
