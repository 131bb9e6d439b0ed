"""The cards in model_cards/ are what the commands and the script beside them write."""

import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest

from hf_refspec.apps.cli.main import main
from hf_refspec.apps.publish import repositories
from hf_refspec.apps.shared.comparison import FEWEST_PROMPTS

pytest.importorskip("gradio")
CARDS = Path(__file__).parents[3] / "model_cards"
TEXT = "Tides are caused by the moon. Spring tides come at new moon and at full moon. "
# Numbers with their units, and names after a content.
FIGURES = re.compile(r"(?<=ngrams-)[0-9a-f]{12}|\d[\d.,]*[kMG]?B?")


@pytest.fixture
def small(tmp_path, monkeypatch, wheel) -> Path:
    """A folder with the sources that the commands name, but small ones."""
    examples = [f"examples/example_{number}.py" for number in range(FEWEST_PROMPTS)]
    for name in ("docs/page.md", "docs/tasks/page.md", *examples):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TEXT * 3)
    (tmp_path / "Lib").mkdir()
    shutil.copy(textwrap.__file__, tmp_path / "Lib")
    (tmp_path / "model_cards").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repositories, "_wheel_of", lambda *_: wheel)
    return tmp_path


@pytest.mark.nightly
def test_the_commands_write_the_cards(small):
    readme = (CARDS / "README.md").read_text(encoding="utf-8")
    commands, script = re.findall(r"```(?:python|bash)\n(.*?)```", readme, re.DOTALL)
    for line in filter(None, commands.splitlines()):
        program, *words = shlex.split(line)
        if program == "cp":
            shutil.copy(*words)
            continue
        if "evaluate" in words:
            words += ["--max-new-tokens", "8"]
        assert program == "hf-refspec" and main(words) == 0
    exec(script)
    written = {
        path.name: path.read_text(encoding="utf-8") for path in Path("model_cards").iterdir()
    }
    assert written.keys() | {"README.md"} == {path.name for path in CARDS.iterdir()}
    for name, card in written.items():
        committed = (CARDS / name).read_text(encoding="utf-8")
        assert FIGURES.sub("0", card) == FIGURES.sub("0", committed), name
        assert str(small) not in card and "not stated" not in card
