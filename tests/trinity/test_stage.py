"""Mode `serve`: where the server is, and whose it is."""

import os
import socket
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tuner.errors import ConfigError
from tuner.trinity.stage import (
    SERVE_KEY,
    KeyGuard,
    fill_mode,
    require_free_port,
    serve_key,
    server_url,
)


@pytest.fixture(autouse=True)
def without_key(monkeypatch):
    monkeypatch.setenv(SERVE_KEY, "")


def config(folder, **explorer):
    return SimpleNamespace(
        checkpoint_job_dir=str(folder), explorer=SimpleNamespace(name="explorer", **explorer)
    )


@pytest.mark.parametrize(
    ("listens", "url"),
    [("0.0.0.0", "http://10.0.0.7:8010"), ("127.0.0.1", "http://127.0.0.1:8010")],
)
def test_the_url_is_where_the_server_listens_once_it_has_said_so(tmp_path, listens, url):
    asked = config(tmp_path, listen_address=listens, proxy_port=8010)
    assert server_url(asked) is None
    (tmp_path / "explorer_server_url.txt").write_text("http://10.0.0.7:8010")
    assert server_url(asked) == url
    key = serve_key()
    assert server_url(asked) == f"{url}/{key}"
    assert (serve_key(), os.environ[SERVE_KEY], len(key)) == (key, key, 32)


def test_another_server_on_the_port_is_not_taken_for_this_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        asked = config(tmp_path, listen_address="127.0.0.1", proxy_port=port)
        with pytest.raises(ConfigError, match=rf"proxy_port: .* 127.0.0.1:{port} .*another port"):
            require_free_port(asked)
    require_free_port(asked)


def test_the_server_is_for_this_machine_unless_asked_otherwise():
    for given, listens in (({}, "127.0.0.1"), ({"listen_address": "0.0.0.0"}, "0.0.0.0")):
        tree = {"explorer": given}
        fill_mode(tree, "serve", 1)
        assert tree["explorer"]["listen_address"] == listens


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models?a=1", None, 401),
        ("/v1/models?a=1", "Bearer EMPTY", 401),
        ("/v1/models?a=1", "Bearer ", 401),
        ("/v1/models?a=1", "Bearer k1", 200),
        ("/k1/v1/models?a=1", "Bearer EMPTY", 200),
        ("/k1/v1/models?a=1", None, 200),
        ("/k/v1/models?a=1", None, 401),
        ("/K1/v1/models", None, 401),
        ("//v1/models", None, 401),
        ("/v1/models/k1", None, 401),
        ("/k1", None, 404),
        ("/nothing", None, 401),
    ],
)
async def test_a_server_behind_a_key_answers_who_has_it(path, key, status):
    scopes = []

    async def models(request):
        scopes.append((request.scope["path"], request.url.query))
        return PlainTextResponse("m")

    app = Starlette(routes=[Route("/v1/models", models)])
    app.add_middleware(KeyGuard, key="k1")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
        answer = await client.get(path, headers={} if key is None else {"authorization": key})
    assert answer.status_code == status
    assert scopes == [("/v1/models", "a=1")] * (status == 200)
    assert ("requires a key" in answer.text) == (status == 401)
