"""The documentation builds, and shows the step, the public names and the messages as they are."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.generation.loop import Loop
from tests.helpers.drafters import Noise

ROOT = Path(__file__).parents[2]
IDS = torch.tensor([[5, 6, 7]])


@pytest.mark.nightly
def test_the_documentation_builds_without_a_warning(tmp_path):
    # mkdocs-material has a notice about mkdocs itself.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "api" / "drafters" / "index.html").read_text(encoding="utf-8")
    assert 'id="hf_refspec.ReferenceCopy"' in reference
    assert "[`" not in reference  # every cross-reference of a docstring has become one
    pages = (tmp_path / "site").rglob("*.html")
    assert not any("fonts.googleapis" in page.read_text(encoding="utf-8") for page in pages)


def test_the_api_reference_has_every_public_name():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    documented = set(re.findall(r"^::: hf_refspec\.(\w+)$", "\n".join(pages), re.M))
    assert documented == {"Blend", *rs.__all__} - {"__version__"}


def test_how_it_works_shows_the_lines_of_the_step():
    page = ROOT / "docs" / "how_it_works.md"
    [shown] = re.findall(r"```text\n(plan = .*?)```", page.read_text(), flags=re.DOTALL)
    source = [line.strip() for line in inspect.getsource(Loop.step).splitlines()]
    first = source.index(shown.splitlines()[0])
    assert source[first : first + len(shown.splitlines())] == shown.splitlines()


def masked(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def generate(model, **options):
    return model.generate(IDS, max_new_tokens=2, do_sample=False, **options)


def not_installed(model):
    rs.uninstall()
    try:
        generate(model, candidate_generator=Noise())
    finally:
        rs.install()


def in_use(model):
    drafter = rs.ReferenceCopy()
    with drafter_call(drafter, [IDS[0].numpy()], 300):
        generate(model, candidate_generator=drafter)


@pytest.mark.parametrize("mistake", [not_installed, in_use])
def test_the_faq_has_the_message_of_a_mistake(mistake, byte_llama):
    with pytest.raises(Exception) as raised:
        mistake(byte_llama)
    message = f"{raised.type.__name__}: {raised.value}".partition(" (note:")[0]
    page = ROOT / "docs" / "faq.md"
    assert masked(message) in masked(page.read_text(encoding="utf-8"))


def test_every_link_of_the_pages_leads_to_a_file_of_the_repository():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([\w./-]+)[)#]", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
