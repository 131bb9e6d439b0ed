"""`hf-refspec space` says what is wrong before it loads anything."""

from __future__ import annotations

import socket
import sys

import pytest


def test_a_missing_extra_is_named(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert 'pip install "hf_refspec[space]"' in refused("space")


def test_a_port_in_use_is_told(refused):
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused("space", "--port", port)
    assert f"--port {port} is in use" in line


def test_private_without_push_is_refused(refused):
    pytest.importorskip("gradio")
    assert "--private has no effect without --push" in refused("space", "--private")
