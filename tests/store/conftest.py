from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import running_hub
from huggingface_hub import constants

from hf_refspec.store import files


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that huggingface_hub takes for the real one, with nobody logged in."""
    with running_hub() as server:
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield server
        huggingface_hub.close_session()


@pytest.fixture
def replaced_when_opened(monkeypatch) -> Callable[[str, bytes], None]:
    """Lets a file be replaced by another one as soon as it is open."""

    def replace(name: str, content: bytes) -> None:
        def opened(path: Path, follow_links: bool = True):
            file = open_file(path, follow_links)
            if path.name == name:
                path.with_name("other").write_bytes(content)
                path.with_name("other").replace(path)
            return file

        open_file = files.open_file
        monkeypatch.setattr(files, "open_file", opened)

    return replace
