"""Trains the small Python language model that is bundled for the demo, on a CPU.

The model reads plain source files of the standard library and, mixed with them, edit pairs: a
piece of code, a comment that asks for a rename, and the edited piece. The pairs teach it to copy.

    python scripts/train_demo_model.py
"""

import argparse
import copy
import math
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_refspec.demo import corpus

END = "<|endoftext|>"
END_ID = 0
VOCABULARY = 4096
# A line break with all blank lines around it and the next line's indent | a word, split at
# underscores | a digit | signs | other spaces. Identifiers then look alike wherever they stand.
PRE_TOKEN = r"\s*\n[ \t]*| ?_*[^\W\d_]+|\d| ?_+| ?[^\s\w]+|\s+(?!\S)|\s+"

BATCH_TOKENS = 2048
# Up to which share of the steps the sequences are how long, and the longest piece of code that is
# edited in them: copying is learnt sooner from short ones.
STAGES = ((0.6, 512, 200), (0.9, 1024, 450), (1.0, 2048, 450))
EVALUATED_LENGTH = 1024
EDIT_SHARE = 0.5  # of the sequences; plain text fills what their pairs leave over
COPY_SHARE = 0.15  # of the edit pairs
SHORTEST_PIECE = 40

HEAD = 64
ROPE_BASE = 500_000.0
INITIAL = 0.02  # the usual size of an untrained weight

WARM_UP = 50
MUON_RATE = 3e-3
ADAM_RATE = 2e-3
EMBEDDING_RATE = 3e-4  # at the full rate the circuit is lost before it is of use
CIRCUIT_RATE = 1e-4
CHECKPOINT_SECONDS = 240
EVALUATED_PAIRS = 200


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer that gives back every text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Names:
    """Makes up identifiers out of the words of the corpus's identifiers."""

    def __init__(self, texts: list[str]) -> None:
        """Collects the words.

        Args:
            texts: Source files.
        """
        identifiers = {name for text in texts for name in re.findall(r"[^\W\d]\w+", text)}
        words = {word for name in identifiers for word in _words(name)}
        self._words = sorted(word for word in words if 2 <= len(word) <= 12)

    def like(self, old: str, rng: random.Random) -> str:
        """Returns a new identifier in the style of an old one.

        Args:
            old: The identifier whose capitals, underscores and number of words are kept.
            rng: The source of randomness.
        """
        count = min(max(len(_words(old)), 1), 3)
        words = rng.choices(self._words, k=count)
        prefix = "_" * (len(old) - len(old.lstrip("_")))
        if old.isupper() and len(old) > 1:
            return prefix + "_".join(words).upper()
        if old.islower() or "_" in old.strip("_"):
            return prefix + "_".join(words)
        capitals = [word.capitalize() for word in words]
        if old.lstrip("_")[0].islower():
            capitals[0] = words[0]
        return prefix + "".join(capitals)


def _words(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


class EditPairs:
    """An endless supply of edit pairs, cut out of source files.

    Attributes:
        longest_piece: The longest piece that is edited, in tokens.
    """

    def __init__(
        self, texts: list[str], names: Names, tokenizer: Tokenizer, rng: random.Random
    ) -> None:
        """Splits the files into top-level blocks.

        Args:
            texts: Source files.
            names: The maker of new identifiers.
            tokenizer: The model's tokenizer.
            rng: The source of randomness.
        """
        self.longest_piece = STAGES[-1][2]
        self._names = names
        self._tokenizer = tokenizer
        self._rng = rng
        self._files = [corpus.top_level_blocks(text) for text in texts]
        self._sizes = [[len(tokenizer.encode(block)) for block in file] for file in self._files]
        self._starts = [(i, j) for i, file in enumerate(self._files) for j in range(len(file))]

    def pair(self) -> tuple[str, str]:
        """Returns a prompt and its answer."""
        while True:
            piece = self._piece()
            if self._rng.random() < COPY_SHARE:
                return corpus.copy_prompt(piece), piece
            olds = corpus.renamable_identifiers(piece)
            if olds:
                break
        old = self._rng.choice(olds)
        new = self._names.like(old, self._rng)
        while re.search(rf"\b{new}\b", piece):
            new = self._names.like(old, self._rng)
        return corpus.rename_prompt(piece, old, new), corpus.rename(piece, old, new)

    def tokens(self) -> tuple[list[int], list[int]]:
        """Returns a pair as tokens, with the end token after the answer."""
        prompt, answer = self.pair()
        return self._tokenizer.encode(prompt).ids, [*self._tokenizer.encode(answer).ids, END_ID]

    def _piece(self) -> str:
        """Joins whole neighbouring blocks until they have a random size within the bounds."""
        high = self.longest_piece
        while True:
            file, first = self._rng.choice(self._starts)
            wanted = self._rng.randint(SHORTEST_PIECE, high)
            size, last = 0, first
            sizes = self._sizes[file]
            while last < len(sizes) and size < wanted and size + sizes[last] <= high:
                size += sizes[last]
                last += 1
            if size >= SHORTEST_PIECE:
                return "".join(self._files[file][first:last]).strip("\n\f")


class PlainText:
    """An endless stream of the files' tokens, in a new order in every epoch."""

    def __init__(self, files: list[list[int]], rng: random.Random) -> None:
        """Takes the files.

        Args:
            files: The tokens of each file.
            rng: The source of randomness.
        """
        self._stream = self._run(files, rng)

    def take(self, count: int) -> list[int]:
        """Returns the next tokens of the stream."""
        return list(islice(self._stream, count))

    @staticmethod
    def _run(files: list[list[int]], rng: random.Random) -> Iterator[int]:
        while True:
            for file in rng.sample(files, len(files)):
                yield END_ID
                yield from file


def batches(
    texts: list[str], names: Names, tokenizer: Tokenizer, steps: int, seed: int
) -> Iterator[Tensor]:
    """Yields the batch of every step, the same ones for the same seed.

    Args:
        texts: The training files.
        names: The maker of new identifiers.
        tokenizer: The model's tokenizer.
        steps: The number of batches.
        seed: The seed of all choices.
    """
    rng = random.Random(seed)
    plain = PlainText([encoding.ids for encoding in tokenizer.encode_batch(texts)], rng)
    pairs = EditPairs(texts, names, tokenizer, rng)
    for step in range(steps):
        length, pairs.longest_piece = next(stage[1:] for stage in STAGES if step < stage[0] * steps)
        rows = []
        for _ in range(BATCH_TOKENS // length):
            row: list[int] = []
            if rng.random() < EDIT_SHARE:
                # A pair cut in two would be an answer without its question, so only whole ones.
                while len(row) + len(pair := [*chain(*pairs.tokens())]) <= length:
                    row += pair
            rows.append(row + plain.take(length + 1 - len(row)))
        yield torch.tensor(rows)


def new_model() -> LlamaForCausalLM:
    """Returns the untrained model; few but wide layers, since each one costs time per token."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=STAGES[-1][1],
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
            tie_word_embeddings=False,
            bos_token_id=END_ID,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
        )
    )
    wire_copying(model)
    return model


@torch.no_grad()
def wire_copying(model: LlamaForCausalLM) -> None:
    """Starts the first two layers as a circuit that continues text as it went on before.

    A run this short did not find such a circuit by itself. In layer 0, three heads bring every
    position the three tokens before it. In layer 1, three heads look for the positions that follow
    the last one, two or three tokens, and bring the token found there. All other parts of the
    layers add nothing at first.

    Args:
        model: The untrained model, changed in place.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # Large beside one step of the optimiser, which else drags rare tokens all the same way and
    # makes them look alike before the circuit is of use.
    embeddings = model.model.embed_tokens.weight.normal_()
    token, answer, one = torch.arange(HEAD), torch.arange(HEAD, 2 * HEAD), 2 * HEAD
    code = HEAD // 2  # A token is told by half as many dimensions: those that can be compared.
    history = [torch.arange(code), *(one + code * back + torch.arange(code) for back in (1, 2, 3))]
    embeddings[:, torch.cat(history[1:])] = 0.0
    embeddings[:, one] = 4.0  # The same for all tokens: where to look, whatever is there.
    model.lm_head.weight[:, answer] = INITIAL * embeddings[:, token]
    for back in (1, 2, 3):
        wire_look_back(model.model.layers[0].self_attn, back, one, history[back])
    for count in (1, 2, 3):
        wire_match(model.model.layers[1].self_attn, count, history, answer)


def wire_look_back(attention: LlamaAttention, back: int, one: int, place: Tensor) -> None:
    """Makes a head write the token some positions back.

    Args:
        attention: The attention of the first layer.
        back: How many positions back, and the number of the head from 1.
        one: The dimension that is the same for all tokens.
        place: The dimensions to write to.
    """
    first, half = (back - 1) * HEAD, HEAD // 2
    rows = slice(first, first + HEAD)
    attention.q_proj.weight[rows] = 0.0
    attention.k_proj.weight[rows] = 0.0
    # Turned back by so many positions, the query is nearest to the key that stands there. The
    # slow dimensions would only add noise.
    fast = torch.arange(half // 4)
    angles = back * ROPE_BASE ** (-fast / half)
    attention.q_proj.weight[first + fast, one] = 3 * angles.cos()
    attention.q_proj.weight[first + half + fast, one] = -3 * angles.sin()
    attention.k_proj.weight[first + fast, one] = 3.0
    attention.v_proj.weight[rows] = torch.eye(HEAD, attention.v_proj.in_features)
    attention.o_proj.weight[place, first + torch.arange(len(place))] = 1.0


def wire_match(
    attention: LlamaAttention, count: int, history: list[Tensor], answer: Tensor
) -> None:
    """Makes a head find where the last tokens stood before, and write what followed them there.

    Args:
        attention: The attention of the second layer.
        count: How many tokens are compared, and the number of the head from 1.
        history: The dimensions of the present token and of those before it.
        answer: The dimensions to write to.
    """
    first, half = (count - 1) * HEAD, HEAD // 2
    rows = slice(first, first + HEAD)
    attention.q_proj.weight[rows] = 0.0
    attention.k_proj.weight[rows] = 0.0
    # The dimensions that hardly turn over a few hundred positions.
    slow = first + torch.cat([torch.arange(half // 2, half), torch.arange(half // 2, half) + half])
    for back in range(count):
        place = slow.roll(11 * back)  # Else the same tokens in another order would match.
        attention.q_proj.weight[place, history[back]] = 1.5
        attention.k_proj.weight[place, history[back + 1]] = 1.5
    attention.v_proj.weight[rows] = torch.eye(HEAD, attention.v_proj.in_features)
    attention.o_proj.weight[answer, first + torch.arange(HEAD)] = 2.0


def new_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Returns Muon for the layers' matrices and AdamW for all else, the circuit slowly."""
    circuit = [p for layer in model.model.layers[:2] for p in layer.self_attn.parameters()]
    embeddings = [model.model.embed_tokens.weight]
    chosen = {id(p) for p in circuit + embeddings}
    others = [p for p in model.parameters() if id(p) not in chosen]
    matrices = [p for p in others if p.ndim == 2 and p is not model.lm_head.weight]
    chosen |= {id(p) for p in matrices}
    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.0}
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in others if id(p) not in chosen], lr=ADAM_RATE, **adamw),
        torch.optim.AdamW(embeddings, lr=EMBEDDING_RATE, **adamw),
        torch.optim.AdamW(circuit, lr=CIRCUIT_RATE, **adamw),
    ]


def train_step(model: LlamaForCausalLM, batch: Tensor) -> float:
    """Accumulates the gradients of one batch and returns its mean loss.

    Args:
        model: The model.
        batch: Token sequences, one longer than the model reads.
    """
    total = 0.0
    for row in batch.split(1):  # One sequence at a time stays in the processor's cache.
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(row[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits[0].float(), row[0, 1:]) / len(batch)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total


def rate(step: int, steps: int) -> float:
    """Returns the learning rate of a step as a share of the peak: warm-up, then a straight fall."""
    return min((step + 1) / WARM_UP, (steps - step) / max(steps - WARM_UP, 1), 1.0)


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    data: Iterator[Tensor],
    steps: int,
    work: Path,
    out: Path,
    resume: bool,
) -> None:
    """Trains the model, with a checkpoint and an exported model every few minutes.

    Args:
        model: The model, changed in place.
        tokenizer: Its tokenizer, for the export.
        data: The batch of every step.
        steps: The number of steps.
        work: The folder of the checkpoint.
        out: The folder of the exported model.
        resume: Whether to go on from the checkpoint.
    """
    optimizers = new_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first = load_checkpoint(work, model, optimizers) if resume else 0
    model.train()
    started = saved = time.monotonic()
    for step, batch in enumerate(islice(data, first, None), first):
        loss = train_step(model, batch)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            seconds = time.monotonic() - started
            print(f"step {step} of {steps}  loss {loss:.3f}  {seconds:.0f} s", flush=True)
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save_checkpoint(work, step + 1, model, optimizers)
            export(model, tokenizer, out)
            saved = time.monotonic()
    print(f"trained in {time.monotonic() - started:.0f} s", flush=True)


def save_checkpoint(
    work: Path, step: int, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Writes what `--resume` needs; a crash while writing leaves the previous checkpoint."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    torch.save(state, work / "checkpoint.new")
    os.replace(work / "checkpoint.new", work / "checkpoint.pt")


def load_checkpoint(
    work: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> int:
    """Reads the checkpoint into the model and optimisers and returns the step to go on with."""
    state = torch.load(work / "checkpoint.pt")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the model in bfloat16 with its tokenizer, replacing an older export in one go."""
    new, old = out.with_name(f".{out.name}.new"), out.with_name(f".{out.name}.old")
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    exported = copy.deepcopy(model).to(torch.bfloat16)
    exported.generation_config = GenerationConfig(
        bos_token_id=END_ID, eos_token_id=END_ID, pad_token_id=END_ID
    )
    exported.save_pretrained(new)
    (new / "model.safetensors").chmod(0o644)  # It is written for its owner's eyes only.
    # In training a text stands behind the end of another: so the model finds where it begins.
    final = copy.deepcopy(tokenizer)
    final.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    PreTrainedTokenizerFast(
        tokenizer_object=final,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=STAGES[-1][1],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(new)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


@torch.inference_mode()
def evaluate_text(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> None:
    """Prints the loss on whole files.

    Args:
        model: The exported model in float32.
        tokenizer: Its tokenizer.
        texts: Held-out files.
    """
    loss, count = 0.0, 0
    for encoding in tokenizer.encode_batch(texts):
        ids = torch.tensor([END_ID, *encoding.ids])
        for start in range(0, len(ids) - 1, EVALUATED_LENGTH):
            window = ids[start : start + EVALUATED_LENGTH + 1]
            logits = model(window[None, :-1], use_cache=False).logits[0]
            loss += F.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    size = sum(len(text.encode()) for text in texts)
    print(f"held out: {len(texts)} files, {count} tokens, {size} bytes")
    print(f"held out: {loss / count:.4f} nats per token, {loss / math.log(2) / size:.4f} bits/byte")


@torch.inference_mode()
def evaluate_edits(model: LlamaForCausalLM, pairs: EditPairs) -> None:
    """Prints how well the model, shown the right text so far, predicts the answers' tokens.

    Args:
        model: The exported model in float32.
        pairs: The supply of pairs from held-out files.
    """
    right, count, perfect = 0, 0, 0
    for _ in range(EVALUATED_PAIRS):
        prompt, answer = pairs.tokens()
        prompt = [END_ID, *prompt]
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        hits = logits[len(prompt) - 1 :].argmax(-1) == torch.tensor(answer)
        right += int(hits.sum())
        count += len(answer)
        perfect += bool(hits.all())
    print(
        f"edits: {right / count:.4f} of {count} tokens right, {perfect} of {EVALUATED_PAIRS} pairs"
    )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    repository = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=6500)
    parser.add_argument("--out", type=Path, default=repository / "hf_refspec" / "demo" / "model")
    parser.add_argument(
        "--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "hf_refspec_demo_model"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Trains, exports and evaluates the model."""
    options = parse_arguments()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)

    texts = [corpus.read_source(path) for path in corpus.training_files()]
    tokenizer = train_tokenizer(texts)
    tokens = sum(len(encoding) for encoding in tokenizer.encode_batch(texts))
    print(f"training: {len(texts)} files, {tokens} tokens, {sum(map(len, texts))} characters")

    names = Names(texts)
    model = new_model()
    print(f"model: {model.num_parameters()} parameters", flush=True)
    data = batches(texts, names, tokenizer, options.steps, options.seed)
    train(model, tokenizer, data, options.steps, options.work_dir, options.out, options.resume)
    export(model, tokenizer, options.out)

    held_out = [corpus.read_source(path) for path in corpus.heldout_files()]
    exported = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    evaluate_text(exported, tokenizer, held_out)
    rng = random.Random(options.seed)
    evaluate_edits(exported, EditPairs(held_out, names, tokenizer, rng))


if __name__ == "__main__":
    main()
