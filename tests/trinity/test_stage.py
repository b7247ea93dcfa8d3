"""Mode `serve`: where the server is, and whose it is."""

import socket
from types import SimpleNamespace

import pytest

from tuner.errors import ConfigError
from tuner.trinity.stage import fill_mode, require_free_port, server_url


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
