"""`hf-refspec serve`: what it refuses before it starts, and how it ends."""

import copy
import re
import signal
import sys

import openai
import pytest
import requests

from hf_refspec import Datastore
from hf_refspec.apps.cli.arguments import listen
from hf_refspec.apps.cli.main import main
from tests.helpers.running_server import forked_server, server_process
from tests.helpers.texts import some_texts


def begun(address: str, key: str = "-"):
    """A stream whose first words have come, and which does not end by itself."""
    client = openai.OpenAI(base_url=address, api_key=key, max_retries=0)
    options = {"temperature": 0, "logit_bias": {"2": -100}, "stream": True}  # 2 ends a text
    stream = client.completions.create(model="bytes", prompt="cat", **options)
    next(stream)
    return stream


def test_ctrl_c_lets_what_runs_finish_and_exits_with_0(folder, tmp_path, tokenizer, monkeypatch):
    """Clients need the key of the environment."""
    monkeypatch.setenv("HF_REFSPEC_API_KEY", "k1\n")
    Datastore.build(some_texts(4), tokenizer, tmp_path / "store")
    options = ["--datastore", tmp_path / "store", "--model", folder, "--max-new-tokens", 400]
    options += ["--assistant-model", folder]
    with server_process(*options) as (child, address, log):
        assert "WARNING" not in "".join(log)
        body = {"model": "bytes", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        key = {"Authorization": "Bearer k1"}
        chat = requests.post(f"{address}/chat/completions", json=body, headers=key).json()
        assert chat["choices"][0]["message"]["annotations"] == []
        assert requests.post(f"{address}/chat/completions", json=body).status_code == 401
        stream = begun(address, "k1")
        child.send_signal(signal.SIGINT)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        error = child.communicate(timeout=600)[1]
    assert child.returncode == 0 and "Traceback" not in error
    assert re.search(r"length: 3 tokens of prompt, 400 of answer, .* \d\.\d\d tokens per", error)


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_at_once_and_others_are_let_in_with_a_warning(folder, tmp_path):
    options = ["--model", folder, "--host", "0.0.0.0", "--max-new-tokens", 2000]
    options += ["--cache", tmp_path / "cache"]
    with server_process(*options) as (child, address, _):
        assert "WARNING everyone who can reach" in child.stderr.readline()
        stream = begun(address)
        child.send_signal(signal.SIGINT)
        assert "ctrl-C again" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        error = child.communicate(timeout=600)[1]
    assert child.returncode == 130 and "Traceback" not in error
    assert "cancelled: 3 tokens of prompt, " in error
    stream.close()


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory, tokenizer):
    """A server with keys, in place of the environment's, names, and a datastore: its address, and
    its log."""
    store = tmp_path_factory.mktemp("stores") / "notes"
    Datastore.build(["ten plus eleven"], tokenizer, store)
    options = ["--model", folder, "--datastore", store, "--host", "0.0.0.0"]
    options += ["--served-model-name", "mine", "my/alias", "--allowed-origins", "https://a.b"]
    options += ["--api-key", "k2", "k1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_REFSPEC_API_KEY", "k0")
        with forked_server(*options) as (address, log):
            yield address, "".join(log)


def test_annotations_have_the_names_that_the_operator_gave(served):
    pytest.importorskip("llguidance")
    schema = {"name": "x", "schema": {"const": "ten plus eleven"}}
    body = {"model": "mine", "messages": [{"role": "user", "content": "say it"}]}
    body["response_format"] = {"type": "json_schema", "json_schema": schema}
    key = {"Authorization": "Bearer k2"}
    answer = requests.post(f"{served[0]}/chat/completions", json=body, headers=key).json()
    places = answer["choices"][0]["message"]["annotations"]
    assert [place["copied_span"]["source"] for place in places] == ["notes"]


def test_clients_need_a_key_and_one_of_the_names(served):
    address, log = served
    assert "mine is served" in log
    client = openai.OpenAI(
        base_url=address, api_key="k1", default_headers={"Origin": "https://a.b"}
    )
    answer = client.models.with_raw_response.list()
    assert answer.headers["Access-Control-Allow-Origin"] == "https://a.b"
    assert [model.id for model in answer.parse()] == ["mine", "my/alias"]
    answer = client.completions.create(model="my/alias", prompt="cat", max_tokens=1)
    assert answer.model == "mine"
    with pytest.raises(openai.NotFoundError, match="this server has mine and my/alias"):
        client.completions.create(model="bytes", prompt="cat")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="k0").models.list()


def test_an_empty_key_is_refused(refused, monkeypatch):
    assert "is empty" in refused("serve", "--api-key", "k", " ")
    monkeypatch.setenv("HF_REFSPEC_API_KEY", "")
    assert "HF_REFSPEC_API_KEY is empty" in refused("serve")


@pytest.mark.parametrize("command", ["serve", "space"])
def test_a_port_in_use_is_refused_before_anything_is_loaded(refused, tmp_path, command):
    pytest.importorskip("gradio")
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        error = refused(command, "--port", port, "--model", tmp_path / "nothing")
    assert f"--port {port} is in use" in error


WRONG = [("--port", each, "0 to 65535") for each in ("-1", "65536", "http")]


@pytest.mark.parametrize(("option", "value", "message"), WRONG)
def test_what_is_no_port_is_refused(capsys, option, value, message):
    with pytest.raises(SystemExit) as exit:
        main(["serve", f"{option}={value}"])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_a_model_that_samples_beams_is_refused(refused, tmp_path, byte_llama, tokenizer):
    model = copy.deepcopy(byte_llama)
    model.generation_config.num_beams = 2
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "num_beams" in refused("serve", "--port", "0", "--model", tmp_path)


@pytest.mark.parametrize(("command", "package"), [("serve", "uvicorn"), ("space", "gradio")])
def test_a_missing_extra_is_named_with_the_line_that_installs_it(
    refused, monkeypatch, command, package
):
    monkeypatch.setitem(sys.modules, package, None)
    error = refused(command)
    assert package in error and f'pip install "hf_refspec[{command}]"' in error
