"""Files of rows: what they are read as, wherever a corpus is named."""

import csv
import gzip
import json
import tracemalloc
from pathlib import Path

import datasets
import pytest

import hf_refspec as rs
from hf_refspec.corpus import rows as corpus_rows
from hf_refspec.corpus.documents import open_source

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
RENDERED = "user: hi\nassistant: hello\n"
DIFFERENT = [
    {"text": "one\u2028more", "n": 1},
    {"messages": CHAT, "text": None},
    {"prompt": "tw", "completion": "o"},
    {"messages": [], "id": 5},
    {"content": "thr\nee", "text": None, "tags": ["a"]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
]
DOCUMENTS = ["one\u2028more", RENDERED, "two", "thr\nee", RENDERED]
LONG = 'a "quoted", [long] {text}\n' * 4000


def lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: Path, rows) -> Path:
    """Writes rows as the name says."""
    if ".csv" in path.name:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        text = json.dumps(rows, indent=1) if ".json" in path.suffixes else lines(rows)
        path.write_text(text, encoding="utf-8-sig")
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


@pytest.fixture
def built(tokenizer, tmp_path):
    """The documents of a datastore that is built from a source."""

    def build(source, **options) -> list[str]:
        store = rs.Datastore.build(source, tokenizer, tmp_path / "store", **options)
        return [tokenizer.decode(ids) for ids in store.iter_documents()]

    return build


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.JSONL.gz", "a.json.gz"])
def test_each_row_is_a_document_by_its_own_columns(built, tmp_path, name):
    assert built(str(write(tmp_path / name, DIFFERENT))) == DOCUMENTS


def test_texts_of_json_stay_as_they_are(built, tmp_path):
    dates = [{"text": "2024-01-01"}, {"text": "2024-01-02 10:00:00"}]
    turns = [{"role": "user", "content": "hi"}], [{"role": "user", "content": ["hi"]}]
    rows = [*dates, *({"messages": chat} for chat in turns)]
    path = write(tmp_path / "a.json", rows)
    assert built(path) == ["2024-01-01", "2024-01-02 10:00:00", "user: hi\n", "user: hi\n"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.csv.gz"])
def test_every_kind_is_read_with_long_rows_and_a_named_column(built, tmp_path, name):
    rows = [{"text": f'{i}, "x"\r\n', "body": f"{i} {LONG}"} for i in range(3)]
    path = write(tmp_path / name, rows)
    assert built(path, column="body") == [row["body"] for row in rows]
    extended = rs.Datastore(tmp_path / "store").add(path)
    assert extended.documents == 6


def test_json_lines_may_be_named_json_and_texts_compressed(built, tmp_path):
    (tmp_path / "a.json").write_text(lines(DIFFERENT))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    assert built([tmp_path / "a.json", tmp_path / "b.txt.gz"]) == [*DOCUMENTS, '{"text": "b"}\n']


def test_settings_below_a_folder_stay_texts(built, tmp_path):
    settings = {
        "a.json": '{"name": "a", "n": 1}\n',
        "b.json": '{"a": 1, // a comment\n}\n',
        "c.csv": "x,y\n1,2\n",
        "d.json": "",
    }
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in settings.items():
        (folder / name).write_text(text)
    write(folder / "e.csv", [{"id": 1, "text": "e"}])
    write(folder / "f.json", [{"text": "f"}, {"content": "g"}])
    assert built(folder) == [*filter(None, settings.values()), "e", "f", "g"]


REFUSED = {
    "no JSON": ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl, row 3 is not valid .jsonl: "),
    "deep": ("a.jsonl", b"[" * 100_000, "a.jsonl, row 1 is not valid .jsonl: "),
    "no object": ("a.jsonl", b'{"text": "a"}\n["b"]\n', "a.jsonl, row 2: which column"),
    "no column": (
        "a.jsonl",
        b'{"text": "a"}\n{"body": "b", "n": 1}\n',
        "a.jsonl, row 2: which column has the documents? Give column=, one of ['body', 'n']",
    ),
    "a number": ("a.jsonl", b'{"text": 7}\n', "a.jsonl, row 1 must be a text or one list of ids"),
    "an id": ("a.jsonl", b'{"text": [259]}\n', "a.jsonl, row 1 has the id 259"),
    "two kinds": (
        "a.jsonl",
        b'{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}\n',
        "a.jsonl, row 1: prompt and completion are list and str; name one by column=",
    ),
    "a broken element": (
        "a.json",
        b'[{"text": "a"},\n{"text" "b"}]',
        "a.json, line 2 is not valid",
    ),
    "a line in .json": (
        "a.json",
        b'{"text": "a"}\n{"text" "b"}',
        "a.json, row 2 is not valid .json",
    ),
    "no end": ("a.json", b'[{"text": "a"}, {"text": "b"}', "a.json, line 1 is not valid .json: "),
    "a short header": ("a.csv", b"text\na,b\n", "a.csv, row 1 is not valid .csv: it has more"),
    "an open quote": ("a.csv", b'text\na\n"b\n', "a.csv, row 2 is not valid .csv: unexpected end"),
    "no Parquet": ("a.parquet", b"text", "a.parquet, row 1 is not valid .parquet: "),
    "not compressed": ("a.jsonl.gz", b"text", "a.jsonl.gz is damaged: Not a gzipped file"),
    "half": ("a.txt.gz", gzip.compress(b"text")[:-9], "a.txt.gz is damaged: "),
    "a damaged half": ("a.jsonl.gz", gzip.compress(b"1" * 99)[:12] + b"\xff" * 30, "is damaged: "),
}


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_named_with_its_row(built, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.") as raised:
        built(tmp_path / name)
    assert message in str(raised.value) and len(str(raised.value)) < 400
    assert not (tmp_path / "store").exists()


def test_a_column_must_be_in_every_row(built, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"body": "a"}, {"text": "b"}])
    with pytest.raises(ValueError, match=r"'body' is not in .*a\.jsonl, row 2; it has \['text'\]"):
        built(path, column="body")
    with pytest.raises(ValueError, match=r"'body' is for datasets .*, not for texts"):
        built(["a"], column="body")


def test_invalid_utf8_and_lone_surrogates_are_replaced_and_told(built, tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "\\ud800b"}\n{"text": "c"}')
    assert built(tmp_path / "a.jsonl") == ["caf?", "?b", "c"]
    assert "replaced invalid characters in 2 texts" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_rows_are_read_as_a_stream(tokenizer, tmp_path, name):
    path = write(tmp_path / name, [{"text": LONG}] * 100)
    tracemalloc.start()
    try:
        lengths = [len(text) for text in open_source(path, tokenizer).documents]
        assert tracemalloc.get_traced_memory()[1] < 20 * len(LONG) < 100 * len(LONG)
    finally:
        tracemalloc.stop()
    assert lengths == [len(LONG)] * 100


def test_models_learn_from_rows(byte_llama, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "abcd"}, {"content": "efg"}])
    knn = rs.KnnDatastore.build(path, tokenizer, byte_llama, tmp_path / "knn")
    texts = rs.KnnDatastore.build(["abcd", "efg"], tokenizer, byte_llama, tmp_path / "of texts")
    assert knn.values.tolist() == texts.values.tolist()
    tables = [
        rs.TokenRecycling.build(documents, tokenizer, byte_llama)
        for documents in (str(path), ["abcd", "efg"])
    ]
    assert len(tables[0]) == len(tables[1])


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "a.parquet"])
def test_a_column_that_stands_twice_is_named(tokenizer, tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        columns = [arrow.array(["one"]), arrow.array(["two"])]
        parquet.write_table(arrow.Table.from_arrays(columns, names=["text", "text"]), path)
    elif name == "a.csv":
        path.write_text("text,n,text\none,1,two\n")
    else:
        path.write_text('{"text": "one", "n": {}, "text": "two"}\n')
    with pytest.raises(ValueError, match=rf"{name}, row 1 .* 2 columns 'text'; rename one"):
        rs.Datastore.build(path, tokenizer, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_a_text_that_is_too_large_is_named_before_all_of_it_is_read(
    tokenizer, tmp_path, name, monkeypatch
):
    monkeypatch.setattr(corpus_rows, "LARGEST", 1 << 20)
    options = {"shard_tokens": 1000}
    begin = {"a.csv.gz": b"text\n", "a.txt.gz": b""}.get(name, b'{"text": "')
    with gzip.open(tmp_path / name, "wb") as file:
        file.write(begin)
        for _ in range(1 << 8):
            file.write(b"x" * (1 << 18))
    rs.Datastore.build(["a"], tokenizer, tmp_path / "first", **options)  # loads modules
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"{name}.* is longer than"):
        rs.Datastore.build(tmp_path / name, tokenizer, tmp_path / "store", **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 25
