"""`hf-refspec generate` and `chat`: prompts, drafts, conversations, and what is refused."""

import io
import re
import signal

import pytest

from hf_refspec import Datastore, ReferenceCopy, SessionDrafts
from hf_refspec.apps.cli.chat import TerminalChat
from hf_refspec.apps.cli.main import main
from hf_refspec.apps.shared.prompts import chat_inputs, user
from hf_refspec.apps.shared.streams import AnswerStream, LiveDrafts, Terminal
from tests.helpers.architectures import small
from tests.helpers.texts import some_texts

SHORT = ["--max-new-tokens", "12"]


pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def generate(folder, capsys):
    """Runs the command, which must succeed; returns what it prints to stdout and stderr."""

    def run(*arguments, model=folder) -> tuple[str, str]:
        capsys.readouterr()
        assert main(["generate", "--model", model, *SHORT, *map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


def test_only_the_text_goes_to_stdout_and_the_statistics_to_stderr(
    generate, byte_llama, tokenizer, tmp_path
):
    inputs = chat_inputs(tokenizer, [user("the cat sat on")])
    ids = byte_llama.generate(**inputs, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    reference = tmp_path / "reference.txt"
    reference.write_text(plain, encoding="utf-8")
    drafted, statistics = generate("the cat sat on", "--reference", reference)
    assert drafted == plain + "\n"
    assert re.fullmatch(r"12 tokens in \d+ passes, MAT \d.*\n", statistics)


def test_layers_and_assistants_of_the_model_draft_beside_look_up(
    generate, folder, mtp_folder, drafter_folder
):
    def answer(*options, model=folder) -> tuple[str, int]:
        text, statistics = generate("the cat", "--max-draft-tokens", 8, *options, model=model)
        return text, int(re.search(r"\(of (\d+) before", statistics)[1])

    text, nodes = answer()
    for drafter in (folder, drafter_folder):
        drafted = answer("--assistant-model", drafter)
        assert drafted[0] == text and drafted[1] != nodes
    text, nodes = answer(model=mtp_folder)
    drafted = answer("--use-mtp", model=mtp_folder)
    assert drafted[0] == text and drafted[1] != nodes


@pytest.mark.parametrize("command", ["chat", "generate x", "demo", "serve --port 0"])
def test_what_drafts_must_fit_the_model(refused, folder, tmp_path, command):
    small("llama", vocab_size=9).save_pretrained(tmp_path)
    command = [*command.split(), "--model", folder]
    assert "`use_mtp=True` does not fit" in refused(*command, "--use-mtp")
    assert "with a vocabulary of 9, but" in refused(*command, "--assistant-model", tmp_path)
    assert "./none" in refused(*command, "--assistant-model", "./none")


def test_the_prompt_is_an_argument_or_stdin(generate, stdin):
    stdin("the cat sat on")
    assert generate()[0] == generate("the cat sat on")[0]


def test_plain_text_is_put_into_the_chat_template_where_there_is_one(generate, templateless):
    chat, _ = generate("the cat")
    assert generate("user: the cat\nassistant: ", model=templateless)[0] == chat
    assert generate("the cat", model=templateless)[0] != chat
    templated = "<s>user: the cat\nassistant: "  # has a special token: it is in a template already
    assert generate(templated)[0] == generate(templated, model=templateless)[0]


def test_context_is_read_by_the_model_and_a_reference_is_not(generate, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a dog\n", encoding="utf-8")
    assert generate("the cat", "--context", text)[0] == generate("a dog\n\nthe cat")[0]
    twice = ["--reference", text, "--reference", text]
    assert generate(*twice, "the cat")[0] == generate("the cat")[0]


def test_sampling_depends_on_the_seed_alone(generate):
    sampling = ["--do-sample", "--temperature", "0.9"]
    texts = [generate("the cat", *sampling, "--seed", seed)[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_it_drafts_from_a_datastore_and_from_earlier_calls(generate, tmp_path, tokenizer):
    Datastore.build(some_texts(4), tokenizer, tmp_path / "store")
    options = ["--datastore", tmp_path / "store", "--cache", tmp_path / "cache"]
    first, _ = generate("the cat", *options)
    second, _ = generate("the cat", *options)
    assert first == second == generate("the cat")[0]
    assert len(SessionDrafts(tokenizer=tokenizer, path=tmp_path / "cache")) == 2


def test_bytes_that_are_no_text_are_no_prompt(refused, folder, stdin):
    stdin(b"\xff\xfe\x00")
    assert "the prompt is not a text in UTF-8" in refused("generate", "--model", folder)


def test_an_answer_ends_where_the_context_of_the_model_does(generate):
    prompt = "x" * (2048 - len("user: \nassistant: ") - 5)
    _, statistics = generate(prompt)
    assert statistics.startswith("5 tokens in ")


@pytest.fixture
def talk(byte_llama, tokenizer, stdin):
    """Says these lines to a chat; returns it and what it printed."""

    def talked(*lines, document=None, max_new_tokens=8, **terminal):
        stdin("".join(f"{line}\n" for line in lines))
        printed = io.StringIO()
        console = Terminal(file=printed, **terminal)
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        drafter = LiveDrafts([ReferenceCopy()])
        chat = TerminalChat(byte_llama, tokenizer, drafter, console, options, document)
        chat.converse()
        return chat, printed.getvalue()

    return talked


@pytest.fixture
def calls(byte_llama, tokenizer, monkeypatch) -> list[tuple[str, dict]]:
    """The prompt of each call of `generate`, and its arguments."""
    generate, calls = type(byte_llama).generate, []

    def recorded(self, *args, **kwargs):
        calls.append((tokenizer.decode(kwargs["input_ids"][0]), kwargs))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(byte_llama), "generate", recorded)
    return calls


def test_each_line_is_a_message_and_the_history_goes_on(talk, calls):
    chat, printed = talk("one", "", "two")
    assert chat.questions == ["one", "two"]
    history = f"user: one\nassistant: {chat.answers[0]}\nuser: two\nassistant: "
    assert [prompt for prompt, _ in calls] == ["user: one\nassistant: ", history]
    assert printed.count("(stopped after 8 tokens)") == 2


def test_a_context_stands_before_the_first_message_only(talk, calls):
    talk("one", "two", "/reset", "three", document="a text\n")
    prompts = [prompt for prompt, _ in calls]
    assert [prompt.count("a text") for prompt in prompts] == [1, 1, 1]
    assert prompts[1].startswith("user: a text\n\none\nassistant: ")
    assert prompts[2] == "user: a text\n\nthree\nassistant: "


def test_commands(talk):
    chat, printed = talk("/help", "/stats", "one", "/stats", "/nonsense x", "/exit", "two")
    assert chat.questions == ["one"]
    assert printed.count("/reset") == 2
    assert printed.index("0 tokens in ") < printed.index("8 tokens in ")
    assert "■ ReferenceCopy " in printed


def test_a_conversation_longer_than_the_context_is_refused_and_reset_helps(talk):
    chat, printed = talk("one", "x" * 3000, "/reset", "two")
    assert "this conversation has 3,0" in printed and "2,048" in printed and "/reset" in printed
    assert chat.questions == ["two"]
    chat, _ = talk("one", "x" * 3000, "two")
    assert chat.questions == ["one", "two"]


def test_an_answer_is_printed_where_no_drafter_runs(talk, monkeypatch):
    chat, printed = talk("one")
    monkeypatch.setattr(LiveDrafts, "observe", lambda *_: None)
    again, printed_again = talk("one")
    assert printed_again == printed and again.answers == chat.answers


def test_a_terminal_gets_a_legend_in_colour_and_a_pipe_only_answers(talk):
    options = {"force_terminal": True, "color_system": "standard", "width": 60}
    _, printed = talk("one", max_new_tokens=30, **options)
    assert "the model itself" in printed and "\x1b[32m" in printed
    _, printed = talk("one", max_new_tokens=30)
    assert "the model itself" not in printed and "\x1b" not in printed


def test_an_answer_broken_off_is_forgotten_with_its_question(
    talk, byte_llama, tokenizer, monkeypatch
):
    generate, mark = type(byte_llama).generate, tokenizer("~")["input_ids"][0]

    def interrupted(self, *args, **kwargs):
        if (kwargs["input_ids"] == mark).any():
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(byte_llama), "generate", interrupted)
    chat, printed = talk("one", "two~", "three")
    assert chat.questions == ["one", "three"]
    assert printed.count("(stopped; the question is forgotten)") == 1


@pytest.fixture
def interrupted(monkeypatch):
    """Presses Ctrl-C at the first token of each answer."""
    put, begun = AnswerStream.put, []

    def interrupting(self, tokens, owners):
        put(self, tokens, owners)
        if self not in begun:
            begun.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AnswerStream, "put", interrupting)


@pytest.mark.usefixtures("interrupted")
def test_a_stopped_answer_stays_in_the_conversation_as_far_as_it_came(talk):
    chat, printed = talk("one", "two", max_new_tokens=500)
    assert printed.count("(stopped)") == 2
    assert chat.questions == ["one", "two"]
    assert all(0 < len(answer) < 100 for answer in chat.answers)


@pytest.mark.usefixtures("interrupted")
def test_neither_ctrl_c_nor_a_line_that_is_no_text_ends_it(folder, stdin, capsys):
    lines = b"one\n" + b"\xff" * 3000 + b"\n/stats\n"
    stdin(lines)
    assert main(["chat", "--model", folder, "--max-new-tokens", "1900"]) == 0
    printed = capsys.readouterr().out
    refused = printed.index("this conversation has")
    assert printed.index("(stopped)") < refused < printed.index(" passes, ")


def test_a_system_message_stands_before_all_and_the_draft_budget_is_the_calls(folder, calls, stdin):
    stdin("one\n/reset\ntwo\n")
    options = ["--system", "be brief", "--max-draft-tokens", "3", "--max-new-tokens", "2"]
    assert main(["chat", "--model", folder, *options]) == 0
    prompts = [f"system: be brief\nuser: {each}\nassistant: " for each in ("one", "two")]
    assert [prompt for prompt, _ in calls] == prompts
    assert [options["max_draft_tokens"] for _, options in calls] == [3, 3]
