"""What a build shows on a terminal, and that files and pipes get none of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

PROGRAM = dedent("""
    import sys
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from hf_refspec.store.datastore import Datastore
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    options = {"num_proc": 1, "shard_tokens": 4}
    store = Datastore.build(["a b a", "b b a"], tokenizer, sys.argv[1], **options)
    store.extend(iter(["a a b"]), **options)
""")


def on_a_terminal(command: list[str]) -> str:
    """What a command writes on a terminal, without its control sequences."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=end, stderr=end, env=environment) as process:
        os.close(end)
        written = b""
        while True:
            try:
                written += os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
    os.close(terminal)
    assert process.returncode == 0, written.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())


def test_a_terminal_shows_the_phases_with_their_counts(tmp_path):
    shown = on_a_terminal([sys.executable, "-c", PROGRAM, str(tmp_path / "store")])
    time = r"\d:\d\d:\d\d"
    assert re.search(rf"✓ tokenizing .* 2 documents, 8 tokens, [\d,]+/s +{time}", shown)
    assert re.search(rf"✓ tokenizing .* 1 document, 4 tokens, [\d,]+/s +{time}", shown)
    for phase in ("sorting", "writing"):
        assert re.search(rf"✓ {phase} .* 2 shards +{time}", shown)
        assert re.search(rf"✓ {phase} .* 1 shard +{time}", shown)


def test_pipes_and_files_get_nothing_even_where_colours_are_forced(tmp_path):
    environment = {**os.environ, "FORCE_COLOR": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    with open(tmp_path / "log", "w") as log:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, env=environment)
    assert (ran.returncode, ran.stdout, Path(tmp_path / "log").read_text()) == (0, b"", "")
