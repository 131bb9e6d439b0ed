"""Which columns of a dataset are read, and as what documents."""

import datasets
import pytest

from hf_refspec.corpus.documents import open_source
from tests.helpers.byte_model import changed

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
RENDERED = "user: hi\nassistant: hello\n"
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
ASKED = [{"role": "user", "content": "hi"}]
ANSWERED = [{"role": "assistant", "content": "hello"}]
CODE = "def f(x):\n    return x + 1\n"
NUMBERED = "3f2a9c0b77"


def dataset(**rows):
    return datasets.Dataset.from_dict(rows)


def stream(**rows):
    return dataset(**rows).to_iterable_dataset(num_shards=min(2, *map(len, rows.values())))


def pandas_frame(**rows):
    return pytest.importorskip("pandas").DataFrame(rows)


def polars_frame(**rows):
    return pytest.importorskip("polars").DataFrame(rows)


@pytest.fixture(params=[dataset, stream, pandas_frame, polars_frame])
def table(request):
    """Makes a table of columns, of each kind that is read as its rows."""
    return request.param


def test_a_named_column_is_read(read, table):
    rows = table(text=["one", None, "two"], other=["x", "y", "z"], ids=[[1], [2], [3]])
    assert read(rows) == ["one", "", "two"]
    assert read(rows, column="other") == ["x", "y", "z"]
    assert [ids.tolist() for ids in read(rows, column="ids")] == [[1], [2], [3]]
    with pytest.raises(ValueError, match="column='nope' is not in the dataset; it has"):
        read(rows, column="nope")


@pytest.mark.parametrize(
    ("rows", "documents"),
    [
        pytest.param(
            {"content": [CODE], "hexsha": [NUMBERED], "lang": ["Python"]}, [CODE], id="the Stack"
        ),
        pytest.param({"id": ["0"], "data": [["hi", "hello"]]}, [RENDERED], id="UltraChat"),
        pytest.param({"id": ["QWJhYvA_0"], "conversations": [SHAREGPT]}, [RENDERED], id="ShareGPT"),
        pytest.param({"prompt_id": [NUMBERED], "messages": [CHAT]}, [RENDERED], id="messages"),
        pytest.param({"prompt": ["def f"], "completion": ["(x): pass"]}, ["def f(x): pass"]),
        pytest.param({"prompt": [ASKED], "completion": [ANSWERED]}, [RENDERED]),
        pytest.param({"text": ["a text"], "messages": [CHAT]}, [RENDERED], id="chats first"),
    ],
)
def test_the_column_is_found(read, table, rows, documents):
    assert read(table(**rows)) == documents


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": ["a first text with words"], "b": ["and a second one"]}, r"one of \['a', 'b'\]"),
        ({"body": ["the only column of texts"], "number": [1]}, r"one of \['body', 'number'\]"),
        ({"id": ["0"], "chat": [[{"who": "me", "says": "hi"}]]}, r"one of \['id', 'chat'\]"),
    ],
)
def test_the_column_is_asked_for_where_none_is_safe(read, table, rows, message):
    with pytest.raises(ValueError, match=f"the dataset: which column .*{message}"):
        read(table(**rows))


def test_a_column_of_something_else_than_chats_is_named(read):
    rows = dataset(chat=[[{"who": "me", "says": "hi"}]])
    with pytest.raises(ValueError, match="a chat: messages with role and content, or from"):
        read(rows, column="chat")


def test_without_a_template_each_turn_is_a_document(tokenizer):
    without_template = changed(tokenizer, chat_template=None)
    for rows in (dataset(messages=[CHAT, []]), dataset(data=[["hi", "hello"], []])):
        documents = list(open_source(rows, without_template).documents)
        assert [len(document) for document in documents] == [2, 5, 0]
        assert documents[:2] == ["hi", "hello"]


def test_a_chat_that_the_template_refuses_is_read_by_turns(tokenizer, caplog):
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    strict = changed(tokenizer, chat_template=refusal + tokenizer.chat_template)
    rows = dataset(conversations=[SHAREGPT[1:], SHAREGPT])
    assert list(open_source(rows, strict).documents) == ["hello", RENDERED]
    assert "refused 1 chat; each turn" in caplog.text


def test_a_streaming_dataset_that_does_not_know_its_columns(read):
    texts = ["a text of several words", "another text of several words"]

    def rows(texts):
        for text in texts:
            yield {"body": text, "length": len(text)}

    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"texts": texts})
    assert stream.features is None
    assert read(stream, column="body") == texts
    with pytest.raises(ValueError, match=r"it has \['body', 'length'\]"):
        read(stream, column="text")
