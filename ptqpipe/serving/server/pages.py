"""The pages for people: the chat at /, and at /docs Swagger UI, whose files come from a package and not from the net.

Each has a policy that lets its own scripts run alone and talk to this server alone.
"""

import base64
import hashlib
import re
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from ptqpipe.serving.server.error_responses import ApiError

_SWAGGER = "fastapi_offline"  # brings Swagger UI's files
_FILES = "/docs/files"
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%231d5fbf'/%3E%3Cpath d='M4 11V5m4 6V7m4 4V9' stroke='white' stroke-width='2'/%3E%3C/svg%3E"
)

# Swagger UI is dark where its page says so; by itself it does not look at what the reader has chosen.
_DARK = 'document.documentElement.classList.toggle("dark-mode", matchMedia("(prefers-color-scheme: dark)").matches)'


def add_pages(app: FastAPI) -> None:
    """Adds both. Without the package of Swagger UI's files /docs says what to install."""
    page = _secured(chat_page())

    @app.get("/", include_in_schema=False)
    async def root() -> HTMLResponse:
        return page

    package = find_spec(_SWAGGER)
    if package is not None and package.origin is not None:
        app.mount(_FILES, StaticFiles(directory=Path(package.origin).parent / "static"))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        if package is None:
            raise ApiError(501, "/docs needs fastapi-offline; pip install 'ptqpipe[serve]'. /openapi.json has the same")
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=escape(app.title),
            swagger_js_url=f"{_FILES[1:]}/swagger-ui-bundle.js",
            swagger_css_url=f"{_FILES[1:]}/swagger-ui.css",
            swagger_favicon_url=_ICON,
        )
        return _secured(bytes(page.body).decode().replace("</head>", f"<script>{_DARK}</script></head>"))


def chat_page() -> str:
    """The chat as one HTML document, from the files in ``page/``."""
    folder = files("ptqpipe.serving.server") / "page"
    read = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file()}
    scripts = read["markdown.js"] + read["chat.js"]
    return read["page.html"].replace("ICON", _ICON).replace("STYLE", read["style.css"]).replace("SCRIPT", scripts)


def _secured(html: str) -> HTMLResponse:
    """A page with its policy: scripts in the page by their hashes, and files of this server."""
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    ]
    scripts = " ".join(f"'sha256-{digest}'" for digest in hashes)
    policy = (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})
