"""Every snippet of README.md and of the documentation runs and prints what stands below it: those
of the documentation in `scripts/test --nightly`.

    HF_REFSPEC_WRITE_OUTPUTS=1 pytest tests/docs/test_snippets.py

writes what they print into the pages.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from hf_refspec import default_model
from tests.helpers.snippets import Snippet, commands, parse, run, server, snippets, with_outputs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
WRITES = bool(os.environ.get("HF_REFSPEC_WRITE_OUTPUTS"))


def snippets_of(page: Path, *kinds: str) -> list[Snippet]:
    return [each for each in snippets(page.read_text(encoding="utf-8")) if each.kind in kinds]


def with_snippets(kind: str, *marks: pytest.MarkDecorator) -> list:
    """The pages with snippets of a kind; all but README.md have these marks."""
    pages = {page: () if page == README else marks for page in PAGES if snippets_of(page, kind)}
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=own) for page, own in pages.items()
    ]


@pytest.mark.parametrize("page", with_snippets("python", pytest.mark.nightly))
def test_the_snippets_of_a_page_run_and_print_what_it_says(
    page, as_in_the_documentation, monkeypatch
):
    namespace, outputs = {"__name__": page.stem}, []
    text = page.read_text(encoding="utf-8")
    if "import simple_evaluate" in text:  # without its own 14,000 tasks, which take long to list
        task_manager = pytest.importorskip("lm_eval.tasks").TaskManager
        monkeypatch.setattr(task_manager.__init__, "__defaults__", (None, None, False, None))
    with server(found := snippets(text)) as url:
        for snippet in found:
            if snippet.kind == "python" or snippet.output is not None:
                outputs.append((snippet, run(snippet, page, namespace, url)))
    if WRITES:
        page.write_text(with_outputs(text, outputs), encoding="utf-8")
    elif Path(default_model()).name == "SmolLM2-135M-Instruct":  # the Hub's words some things else
        for snippet, output in outputs:
            assert snippet.prints(output), f"{page}:{snippet.line} prints\n{output}"


@pytest.mark.parametrize("page", with_snippets("bash"))
def test_a_command_of_a_page_takes_each_of_its_words(page):
    for snippet in snippets_of(page, "bash"):
        for arguments in commands(snippet.code):
            parsed = parse(arguments)
            named = {arguments[0], *parsed.run.__name__.split("_")}  # a command, one of its own
            words = {word.rstrip("/") for word in arguments if not word.startswith("-")}
            unknown = words - named - values(list(vars(parsed).values()))
            assert not unknown, f"{page}:{snippet.line} {unknown}"


def values(parsed: Any) -> set[str]:
    """All values that a command has found among its arguments."""
    if isinstance(parsed, list | tuple):
        return set().union(*map(values, parsed))
    return {str(parsed)}
