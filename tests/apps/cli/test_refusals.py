"""What a command cannot do is refused with status 2 and one line that names it."""

import shlex
import shutil
from pathlib import Path

import pytest

from hf_refspec.store.datastore import Datastore
from tests.helpers.byte_model import word_tokenizer

FILES = {
    "texts/a.txt": b"text a: the cat sat on the mat",
    "texts/b.txt": b"text b: the cat sat on the mat",
    "short/abc": b"abc",
    "picture.png": b"\x89PNG\xff",
    "empty.md": b" \n",
    "long.txt": b"x" * 3000,
    "asked.jsonl": b'{"text": "cat"}\n',
    "chats.jsonl": b'{"turns": ["cat"], "reference": ["mat"]}\n',
}
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
LOADING = ("bench", "chat", "demo", "generate", "serve")


@pytest.fixture(scope="module")
def root(tmp_path_factory, folder, templateless, tokenizer) -> Path:
    """Files, models, tokenizers and datastores, by the names that the lines below have."""
    root = tmp_path_factory.mktemp("root")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    (root / "exists").mkdir()
    (root / "model").symlink_to(folder)
    (root / "templateless").symlink_to(templateless)
    shutil.copytree(templateless, root / "no_system")
    (root / "no_system" / "chat_template.jinja").write_text(NO_SYSTEM)
    store = Datastore.build(["the cat sat on the mat"], tokenizer, root / "store")
    store.compact(root / "compact")
    words = word_tokenizer("a")
    words.save_pretrained(root / "words")
    Datastore.build([[0, 0]], words, root / "of_words")
    return root


BUILD = "store build --tokenizer model --out new"
EVALUATE = "store evaluate --model model"
BENCH = "bench --prompts chats.jsonl --drafters"
REPLAY = "bench --replay chats.jsonl"
NO_SOURCE = "'missing' is neither a file nor a folder"
INDEX = "--package hf_refspec"  # no wheel is built
SPACE = f"space {INDEX} --push owner/page"
# Command lines, of which "--model model" is left out, and parts of the messages, in order.
REFUSED = [
    ("generate x --reference missing.md", "--reference missing.md cannot be read: No such file"),
    ("generate --reference long.txt empty.md", "'empty.md' is a file: give '<' or"),
    ("generate x --context missing.md", "--context missing.md"),
    ("generate x --context picture.png", "--context picture.png is not UTF-8 text"),
    ("generate x --context .", "--context . cannot be read: Is a directory"),
    ("generate x --reference empty.md", "--reference empty.md is empty"),
    ("generate x --cache empty.md", "empty.md"),
    ("generate x --model missing/model/folder", "missing/model/folder"),
    ("generate ' '", "the prompt is empty"),
    ("generate \udcff", "the prompt is not a text in UTF-8"),
    (f"generate {'x' * 3000}", "the prompt has 3,018 tokens … 2,048 … shorten it"),
    ("generate x --device-map atuo", "'balanced', "),
    ("generate x --temperature 0.5", "--temperature 0.5 … --do-sample"),
    ("generate x --seed 1", "--seed 1 … --do-sample"),
    ("generate x --do-sample --temperature 0", "--temperature 0.0 … above 0"),
    ("generate x --do-sample --temperature nan", "--temperature nan … above 0"),
    (f"generate x --do-sample --seed {2**70}", f"--seed {2**70} … 64 bits"),
    ("chat --model templateless", "templateless … hf-refspec generate"),
    ("chat --context long.txt", "--context long.txt … 2,048"),
    (
        "chat --model no_system --system x",
        "the chat template refuses these messages: no system; leave out --system",
    ),
    ("demo --model templateless", "no chat template; choose a --model"),
    ("demo --model no_system", "the chat template refuses these messages: no system"),
    ("demo --svg nowhere/demo.svg", "--svg nowhere/demo.svg cannot be written"),
    (f"{BENCH} ReferenceCopi", "--drafters 'ReferenceCopi': 'ReferenceCopi' is none of auto, "),
    (f"{BENCH} DatastoreDrafts", "DatastoreDrafts=STORE"),
    (f"{BENCH} DatastoreDrafts=./none", "--drafters 'DatastoreDrafts=./none': './none' does not"),
    (
        f"{BENCH} assistant_model=nofolder",
        "--drafters 'assistant_model=nofolder': 'nofolder' is neither a folder here … be reached",
    ),
    (
        f"{BENCH} assistant_model=./none",
        "--drafters 'assistant_model=./none': './none' does not exist",
    ),
    (
        f"{BENCH} assistant_model=words",
        "'assistant_model=words': words is not the folder of a model",
    ),
    ("bench --prompts none.jsonl", "none.jsonl is not a file"),
    (f"{REPLAY} --drafters TokenRecycling", "TokenRecycling needs a model; with --replay name"),
    (f"{REPLAY} --max-draft-tokens auto", "--max-draft-tokens auto is measured on a model"),
    ("bench --replay asked.jsonl", "has no recorded answers in reference, answer, … add them"),
    (f"{EVALUATE} ./missing texts", "does not exist; name a folder"),
    (f"{EVALUATE} store missing", NO_SOURCE),
    (f"{EVALUATE} store texts --prompts asked.jsonl", "give one of: texts"),
    (f"{EVALUATE} store", "give one of: texts that are not in the datastore, --prompts FILE"),
    (f"{EVALUATE} store --prompts missing", "missing is not a file"),
    (f"{EVALUATE} store short", "no text has the 8 tokens"),
    (f"{EVALUATE} of_words texts", "was made for another tokenizer"),
    (BUILD, "give one of: files or folders"),
    (f"{BUILD} --dataset org/none", "'org/none' is not a folder here … the Hub cannot be reached"),
    (f"{BUILD} --dataset ./missing", "does not exist"),
    (f"{BUILD} missing", NO_SOURCE),
    (f"{BUILD} texts --dataset texts", "give one of: files or folders"),
    (f"{BUILD} texts --pattern *.rs", "has no file that matches '*.rs'"),
    *((f"{BUILD} texts --pattern {p}", f"pattern '{p}' cannot be used") for p in ("/x", "/")),
    (f"{BUILD} texts/a.txt --column text", "column='text'"),
    (f"{BUILD} /dev/null", "'/dev/null' is neither … the output of a pipe into a file"),
    (f"{BUILD} --dataset missing.jsonl", "'missing.jsonl' does not exist"),
    (f"{BUILD} chats.jsonl", "chats.jsonl, row 1: which column has … Give column=, one of"),
    (f"{BUILD} chats.jsonl --column x", "column='x' is not in chats.jsonl, row 1; it has"),
    (f"{BUILD} texts --shard-tokens {2**31}", "shard_tokens must be at most"),
    (f"{BUILD} texts/max_tokens", "texts/max_tokens"),
    ("store build texts --tokenizer model --out store", "store exists"),
    ("store build texts --tokenizer texts --out new", "texts is not the folder of a tokenizer"),
    ("store search store ''", "text has no tokens"),
    ("serve --port 0 --host 192.0.2.1", "--host 192.0.2.1"),
    ("serve --port 0 --host no.such.host.invalid", "--host no.such.host.invalid"),
    ("serve --port 0 --isolate --cache new", "--cache keeps texts"),
    ("serve --port 0 --reference nothing", "nothing"),
    ("serve --port 0 --datastore ./nothing", "./nothing"),
    ("serve --port 0 --cache empty.md", "empty.md"),
    (f"{SPACE} --model model", "--model model is not on the Hub"),
    (f"{SPACE} --datastore store", "--datastore store is not on the Hub"),
    ("publish a/b/c", "Repo id must … a/b/c"),
    ("publish a/b/c --out new", "Repo id must … a/b/c"),
    ("space --push a/b/c", "Repo id must … a/b/c"),
    (f"publish owner/refspec {INDEX} --out exists", "exists"),
    ("publish owner/refspec --package no.whl", "--package no.whl is neither a wheel of"),
    ("publish owner/refspec --package torch==2", "--package torch==2 is neither a wheel of"),
]


@pytest.mark.parametrize(("line", "parts"), REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_bad_input_is_named_in_one_line_and_nothing_is_written(
    line, parts, root, offline, refused, monkeypatch
):
    monkeypatch.chdir(root)
    command, *arguments = shlex.split(line)
    if command in LOADING and "--model" not in arguments:
        arguments += ["--model", "model"]
    before, message = sorted(root.rglob("*")), refused(command, *arguments)
    for part in parts.split(" … "):
        assert part in message
        message = message.partition(part)[2]
    assert sorted(root.rglob("*")) == before
