import pytest
import torch

from tests.helpers.hub_server import hub_in_place


@pytest.fixture
def as_in_the_documentation(monkeypatch, tmp_path):
    """What the pages take for granted: a folder to work in, and an account on the Hub."""
    monkeypatch.chdir(tmp_path)
    with hub_in_place(monkeypatch, tmp_path), torch.random.fork_rng():
        yield
