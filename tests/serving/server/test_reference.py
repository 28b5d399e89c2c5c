"""Claims about what tells how to use the server: /docs without a network, openapi.json, errors that show the way."""

import asyncio
import json
import re

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from ptqpipe.serving.server.pages import add_pages
from tests.serving.server.conftest import Server


def test_every_route_and_field_is_described(server: Server) -> None:
    with server.client() as http:
        found = http.get("/openapi.json").json()
    for path, methods in found["paths"].items():
        for method in methods.values():
            assert len(method["description"]) > 10, path
            assert " " in method["summary"], path
            assert method["summary"].lower() != method["operationId"].split("__")[0].replace("_", " ")
    for name in ("CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody", "Message", "StreamOptions"):
        for field, what in found["components"]["schemas"][name]["properties"].items():
            assert len(what.get("description", "")) > 5, f"{name}.{field}"


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/v1/chat", 404), ("GET", "/v1/completions", 405)])
def test_a_path_without_a_route_lists_those_that_there_are(server: Server, method: str, path: str, status: int) -> None:
    with server.client() as http:
        response = http.request(method, path)
    assert response.status_code == status
    message = response.json()["error"]["message"]
    assert f"there is no {method} {path} here" in message
    for route in ("POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "GET /health"):
        assert route in message


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json_is_refused_with_the_header_to_add(server: Server, kind: str | None) -> None:
    """Another site's page may send it unasked, without seeing the answer: it must not start any work."""
    with server.client() as http:
        headers = {} if kind is None else {"content-type": kind}
        response = http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert response.status_code == 415
    message = response.json()["error"]["message"]
    assert "content-type: application/json" in message
    assert (kind or "no content-type") in message


def test_docs_say_what_to_install_or_bring_their_own_files(server: Server) -> None:
    with server.client() as http:
        page = http.get("/docs")
        if page.status_code == 501:
            assert "ptqpipe[serve]" in page.json()["error"]["message"]
            return
        files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert [file for file in files if not file.startswith(("docs/files/", "data:"))] == []
        for file in files:
            if not file.startswith("data:"):
                assert http.get(f"/{file}").status_code == 200
        assert http.get("/docs/files/../../app.py").status_code == 404


def test_a_model_whose_name_is_markup_runs_nothing_in_docs() -> None:
    pytest.importorskip("fastapi_offline")
    app = FastAPI(title="</title><script>alert(1)</script>", docs_url=None)
    add_pages(app)
    page = TestClient(app).get("/docs")
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "&lt;script&gt;alert(1)" in page.text


@pytest.mark.slow
def test_swagger_ui_shows_the_routes_within_its_policy(server: Server) -> None:
    pytest.importorskip("fastapi_offline")
    pytest.importorskip("aiohttp")
    from tests.serving.server import browser

    if browser.BINARY is None:
        pytest.skip("no Chromium on this machine")

    async def main() -> None:
        async with browser.opened(f"{server.url}/docs", width=1400, height=900, dark=False) as page:
            await page.until("document.querySelectorAll('.opblock').length > 5")
            shown = json.dumps(await page.value("document.body.innerText"))
            assert "/v1/chat/completions" in shown
            assert page.problems == []
        async with browser.opened(f"{server.url}/docs", width=1400, height=900, dark=True) as page:
            await page.until("document.querySelectorAll('.opblock').length > 5")
            back = await page.value("getComputedStyle(document.querySelector('.swagger-ui')).backgroundColor")
            assert sum(int(x) for x in re.findall(r"\d+", back)[:3]) < 3 * 64
            assert page.problems == []

    asyncio.run(main())
