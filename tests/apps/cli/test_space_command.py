"""`hf-refspec space` says what is wrong before it loads anything."""

from __future__ import annotations

import importlib.util
import socket

import pytest


@pytest.fixture
def no_gradio(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "gradio" else find(name, *a)
    )


def test_a_missing_extra_is_named(no_gradio, refused):
    assert 'pip install "hf_refspec[space]"' in refused("space")


def test_a_port_in_use_is_told(refused):
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused("space", "--port", port)
    assert f"cannot serve at 127.0.0.1:{port} (Address already in use)" in line
    assert "choose another --port" in line


def test_a_port_that_is_none_and_private_without_push_are_refused(refused):
    pytest.importorskip("gradio")
    assert "cannot serve at 127.0.0.1:99999" in refused("space", "--port", "99999")
    assert "--private has no effect without --push" in refused("space", "--private")
