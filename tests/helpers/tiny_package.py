"""A package of a tiny model that stands in for the default model's: the same code converts it in no
time."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from hf_refspec import smollm2

default_model = smollm2.default_model.__wrapped__  # which asks again at each call
GGUF_FILE = "tiny.Q4_1.gguf"


def content(folder: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_gguf(path: Path) -> None:
    """A random llama of one layer whose tokens are bytes."""
    width, vocab = 32, ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    rng = np.random.default_rng(0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", rng.normal(size=width).astype(np.float32))
    matrices = [f"attn_{part}" for part in ("q", "k", "v", "output")]
    matrices = [f"blk.0.{name}" for name in (*matrices, "ffn_gate", "ffn_up", "ffn_down")]
    for name, rows in {"token_embd": len(vocab), **dict.fromkeys(matrices, width)}.items():
        weights = rng.normal(size=(rows, width)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
