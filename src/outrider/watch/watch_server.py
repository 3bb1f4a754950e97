"""Serves the live page on loopback: the page, its script and style, and a stream of views (server-sent events).

Decides who may read: only requests with the token of this start in their path, from a name of this machine. Nothing is
written and no other address is contacted. Called by `outrider watch` and by the process of `watch=True`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import secrets
import socket
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigError
from outrider.watch.run_catalog import RunCatalog

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

HINT = "pip install 'outrider[watch]'"
PORT = 8377
EVERY_S = 1.0
_TURN_S = 0.1
"""How soon a stream notices that the server ends."""
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
ASSETS = ("live_page.js", "live_page.css", "uPlot.iife.min.js", "uPlot.min.css")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    # The token is part of the address and must not reach other pages.
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def check_installed() -> None:
    """Raise where the libraries of the live page are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the live page needs {' and '.join(missing)}, not installed here", hint=HINT)


def yield_to_training() -> None:
    """Give this process a low priority: where cores are few, training comes first."""
    with contextlib.suppress(OSError):
        os.nice(10)


def is_local_host(value: str) -> bool:
    """Whether a Host header names this machine itself, at any port: an SSH tunnel may use another one.

    A page elsewhere whose name was made to point here (DNS rebinding) has another name.
    """
    name = value.rsplit("]", 1)[0].lstrip("[") if value.startswith("[") else value.rsplit(":", 1)[0]
    name = name.lower().rstrip(".")
    return name in ("localhost", "127.0.0.1", "::1") or name.endswith(".localhost")


class TokenGuard:
    """Lets only GET requests with the token and a local Host through; the rest of the path goes on."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        status = self._refusal(scope)
        if status is not None:
            await _plain(*status)(scope, receive, send)
            return
        await self._app({**scope, "path": "/" + scope["path"][2 + len(self._token) :]}, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not is_local_host(hosts[0]):
            return 403, "this page is only for this machine: use localhost, or an SSH tunnel to it"
        if scope["method"] != "GET":
            return 405, "only GET: nothing can be changed here"
        given, _, _ = scope["path"].encode("utf-8", "surrogateescape").lstrip(b"/").partition(b"/")
        is_whole = scope["path"].startswith(f"/{self._token.decode()}/")
        if not secrets.compare_digest(given, self._token) or not is_whole:
            return 404, "no such page: the address that outrider printed has a token in it"
        return None


def _plain(status: int, text: str) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text + "\n", status_code=status, headers=_HEADERS)


class WatchServer:
    """The server of one catalog; `run()` serves until it is told to stop."""

    def __init__(self, folder: Path, *, port: int = PORT) -> None:
        check_installed()
        self._catalog = RunCatalog(folder)
        self._token = secrets.token_urlsafe(16)
        self._socket = _bind(port)
        self._server = self._make_server()

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/{self._token}/"

    def run(self) -> None:
        """Serve; returns after `stop()` or a signal."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End the streams with a last view, then the server; may be called from another thread."""
        self._server.should_exit = True

    def _make_server(self) -> uvicorn.Server:
        import uvicorn

        return uvicorn.Server(
            uvicorn.Config(
                TokenGuard(self._app(), self._token),
                log_level="error",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )

    def _app(self) -> ASGIApp:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/", self._page),
            Route("/assets/{name}", self._asset),
            Route("/view", self._view),
            Route("/stream", self._stream),
        ]
        return Starlette(routes=routes)

    @property
    def _is_ending(self) -> bool:
        """After `stop()` or a signal; the streams look at it, for they would hold the shutdown up."""
        return self._server.should_exit

    async def _page(self, request: Request) -> Response:
        return _asset_response("live_page.html")

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _asset_response(name) if name in ASSETS else _plain(404, "no such file")

    async def _view(self, request: Request) -> Response:
        from starlette.responses import Response as Answer

        text = self._text(request, is_fresh=True)
        return Answer(text, media_type="application/json", headers=_HEADERS)

    async def _stream(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        return StreamingResponse(self._views(request), media_type="text/event-stream", headers=_HEADERS)

    def _text(self, request: Request, *, is_fresh: bool) -> str:
        name = request.query_params.get("run")
        return self._catalog.text(name, is_fresh=is_fresh) or '{"names":[],"run":null}'

    async def _views(self, request: Request) -> AsyncIterator[bytes]:
        """A view whenever something has changed, and a comment every few seconds, which shows a broken connection."""
        last, silent_s = b"", 0.0
        while True:
            is_last = self._is_ending
            text = self._text(request, is_fresh=is_last).encode()
            digest = hashlib.blake2b(text, digest_size=16).digest()
            if digest != last:
                last, silent_s = digest, 0.0
                yield b"data: " + text + b"\n\n"
            elif silent_s >= 10:
                silent_s = 0.0
                yield b": still here\n\n"
            if is_last:
                yield b"event: bye\ndata: {}\n\n"
                return
            silent_s += EVERY_S
            for _ in range(round(EVERY_S / _TURN_S)):
                await asyncio.sleep(_TURN_S)
                if self._is_ending or await request.is_disconnected():
                    break
            if await request.is_disconnected():
                return


def _asset_response(name: str) -> Response:
    from starlette.responses import Response as Answer

    content = (resources.files("outrider.watch") / "assets" / name).read_bytes()
    return Answer(content, media_type=_TYPES[Path(name).suffix], headers=_HEADERS)


def _bind(port: int) -> socket.socket:
    """The usual port, or any other where that one is taken."""
    for wanted in (port, 0) if port == PORT else (port,):
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("127.0.0.1", wanted))
            # Whoever opens the address at once waits for the server, and is not refused.
            bound.listen()
        except OSError as error:
            bound.close()
            refused = error
            continue
        return bound
    raise ConfigError(
        f"cannot serve on port {port}: {refused.strerror}", hint="leave --port out, or pass a free one"
    ) from refused
