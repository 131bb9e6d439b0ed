"""What others have written cannot command a terminal."""

import json
import re

import pytest

from hf_refspec.apps.cli.main import main
from hf_refspec.corpus.untrusted import one_line, printable
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.hub import card

RED = "\x1b[31mred\x9b0m\u202e"


def test_control_characters_are_written_as_python_writes_them():
    assert printable(f"é 日 {RED}\n") == r"é 日 \x1b[31mred\x9b0m\u202e\n"
    assert printable(None) == "None"
    assert one_line(ValueError("a\n  b\x1b")) == r"a b\x1b"


@pytest.fixture
def store(tmp_path, tokenizer):
    """A datastore whose config.json is full of escape sequences."""
    path = Datastore.build(["one", "two"], tokenizer, tmp_path / "store").path
    content = json.loads((path / "config.json").read_text())
    content |= {"tokenizer": RED, "fingerprint": RED}
    content["source"] |= {"corpus": RED, "license": RED}
    content["tokenizer_file"]["sha256"] = RED
    (path / "config.json").write_text(json.dumps(content))
    return path


def test_a_config_is_described_without_them(store, capsys):
    assert main(["store", "info", str(store)]) == 0
    assert main(["store", "info", str(store), "--verify"]) == 2
    for text in (*capsys.readouterr(), card(StoreConfig.read(store), "owner/store")):
        assert not re.search(r"[^\n\t\x20-\x7e\xa0-\u1fff]", text)
        assert r"\x1b[31mred" in text
    assert repr(Datastore(store)).isprintable()
