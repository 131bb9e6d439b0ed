"""What the server says of itself."""

from __future__ import annotations

import requests
from running_server import NAME


def page(server, path: str) -> requests.Response:
    response = requests.get(server.url.removesuffix("/v1") + path, timeout=60)
    assert response.status_code == 200
    return response


def test_the_start_page_names_the_model_and_what_can_be_asked(server):
    start = page(server, "/").json()
    assert (start["model"], start["base_url"]) == (NAME, server.url)
    assert {"POST /v1/chat/completions", "POST /v1/completions"} <= {*start["endpoints"]}
    body = start["try"].partition("-d '")[2].removesuffix("'")
    assert server.post(body).status_code == 200


def test_the_documentation_has_every_field(server):
    assert "swagger" in page(server, "/docs").text
    schema = page(server, "/openapi.json").json()
    for path, field in [("chat/completions", "tools"), ("completions", "prompt")]:
        body = schema["paths"][f"/v1/{path}"]["post"]["requestBody"]
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        fields = schema["components"]["schemas"][name]["properties"]
        assert {"temperature", field} <= fields.keys()
