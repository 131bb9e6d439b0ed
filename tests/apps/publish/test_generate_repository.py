"""The Hub repository for `generate(custom_generate="user/name")`, with transformers' own loader."""

import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest
import transformers.dynamic_module_utils

import hf_refspec as rs
from hf_refspec.apps.cli.main import main
from hf_refspec.apps.publish.repositories import generate_repository
from tests.helpers.hub_server import TOKEN

INDEX = ["--package", f"hf_refspec=={rs.__version__}"]
PROMPT = "What is copied can be drafted, and what is drafted can be copied. What is"


def test_the_card_has_the_tags_and_sections_that_transformers_asks_for():
    written = generate_repository("owner/refspec")
    requirements = written["custom_generate/requirements.txt"].decode()
    assert requirements == f"hf_refspec>={rs.__version__}\n"
    card = written["README.md"].decode()
    metadata = card.split("---\n")[1]
    assert "library_name: transformers\n" in metadata
    assert "- custom_generate\n" in metadata
    assert re.findall("^## (.*)", card, re.MULTILINE) == [
        "Description",
        "Base model",
        "Model compatibility",
        "Additional Arguments",
        "Output Type changes",
        "Example usage",
    ]
    assert 'custom_generate="owner/refspec", trust_remote_code=True' in card
    assert f'\npip install "hf_refspec=={rs.__version__}"\n' in card
    assert "$" not in card


def test_a_wheel_lies_in_the_repository_and_the_card_says_how_to_get_it(wheel, tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "out"), "--package", str(wheel)]
    assert main(["publish", "owner/refspec", *arguments]) == 0
    said = capsys.readouterr().out
    files = ["README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"]
    assert f"out: {', '.join([*files, wheel.name])}\n" in said
    assert f"push it: hf upload owner/refspec {tmp_path / 'out'} --repo-type model\n" in said
    assert (tmp_path / "out" / wheel.name).read_bytes() == wheel.read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        f"\nhf download owner/refspec {wheel.name} --local-dir .\npip install {wheel.name}\n"
        in card
    )


def test_a_name_without_an_owner_is_completed_by_the_reader_or_the_hub(
    tmp_path, capsys, hub, monkeypatch
):
    out = tmp_path / "out"
    assert main(["publish", *INDEX, "refspec", "--out", str(out)]) == 0
    assert f"push it: hf upload USER/refspec {out} " in capsys.readouterr().out
    assert '"USER/refspec"' in (out / "README.md").read_text()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["publish", *INDEX, "again"]) == 0
    said = capsys.readouterr().out
    assert "/owner/again\n" in said and "custom_generate='owner/again'" in said
    assert '"owner/again"' in hub.repos["owner/again"].files()["README.md"].decode()


def test_references_and_a_datastore_leave_the_ids_plain(
    byte_llama, tokenizer, tmp_path, monkeypatch
):
    modules = str(tmp_path / "modules")  # where transformers copies remote code
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    folder = tmp_path / "repository"
    assert main(["publish", "owner/refspec", "--out", str(folder), *INDEX]) == 0
    store = rs.Datastore.build([PROMPT], tokenizer, tmp_path / "store")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    call = {**inputs, "max_new_tokens": 40}
    plain = byte_llama.generate(**call)
    call |= {"custom_generate": str(folder), "trust_remote_code": True}
    for given in (
        {},
        {"references": PROMPT, "tokenizer": tokenizer},
        {"datastore": str(store.path)},
    ):
        assert byte_llama.generate(**call, **given).equal(plain)


@pytest.mark.nightly
def test_from_the_hub_a_process_that_never_imports_the_package_gets_the_same_ids(
    model_folder, tmp_path, hub, monkeypatch, capsys
):
    script = f"""
        import sys
        from transformers import AutoModelForCausalLM, AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained({str(model_folder)!r})
        model = AutoModelForCausalLM.from_pretrained({str(model_folder)!r})
        inputs = tokenizer({PROMPT!r}, return_tensors="pt")
        plain = model.generate(**inputs, max_new_tokens=40)
        print("hf_refspec" in sys.modules)
        ids = model.generate(**inputs, max_new_tokens=40, custom_generate="owner/refspec",
                             trust_remote_code=True)
        print(ids.equal(plain), "hf_refspec" in sys.modules)
    """
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
    }
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["publish", "owner/refspec", "--private", *INDEX]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{hub.endpoint}/owner/refspec"
    assert hub.repos["owner/refspec"].private
    command = [sys.executable, "-c", dedent(script)]
    used = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert used.stdout == "False\nTrue True\n", used.stderr
