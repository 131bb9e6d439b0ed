"""One rank of a model that is split over several processes, for `verification/test_ranks.py`."""

import json
import os
import sys
from datetime import timedelta
from functools import partialmethod
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.verification.model_memo import memo_of
from tests.helpers.architectures import WINDOW, small
from tests.helpers.calls import GREEDY, PROMPT, StopAtCall, padded_prompts
from tests.helpers.drafters import Prophet, Prophets
from tests.helpers.heads import ReadsStates
from tests.helpers.pass_times import passes_take

NEW_TOKENS = 24  # of the longest texts


class NeverAsked(ReadsStates):
    def get_candidates(self, input_ids, **kwargs):
        raise AssertionError("no states can be read")


def save_models(folder: Path) -> None:
    """Saves the models that the ranks load."""
    for name in ("llama", "mistral"):
        shape = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
        shape["vocab_size"] = 99  # some releases want it divisible by the number of ranks
        small(name, **shape).save_pretrained(folder / name)


class Raises(Prophet):
    """Raises an exception in its second draft or its second observation."""

    def __init__(self, target_ids, where: str):
        super().__init__(target_ids, 0.9)
        self.where, self.calls = where, 0

    def draft(self, budget, call):
        self._count("draft")
        return super().draft(budget, call)

    def observe(self, observation):
        self._count("observe")
        super().observe(observation)

    def _count(self, where):
        self.calls += where == self.where
        if self.calls == 2:
            raise LookupError(f"no {where}")


class Cases:
    """Cases of all kinds of split models. Each returns the ids of plain decoding and those with
    drafts, or the text of an exception. `own` decodes plainly, `model` is the one that is split."""

    model: PreTrainedModel
    own: PreTrainedModel

    def __init__(self, rank: int, prompt: torch.Tensor = PROMPT, new_tokens: int = NEW_TOKENS):
        self.rank, self.prompt = rank, prompt
        self.options = {**GREEDY, "max_new_tokens": new_tokens}
        self.plain = self.own.generate(prompt, **self.options)

    def generate(self, **options):
        return self.model.generate(**{"inputs": self.prompt, **self.options, **options})

    def prophet(self, plain=None):
        """A drafter that drafts something else at each rank."""
        return Prophet(self.plain if plain is None else plain, 0.8, seed=self.rank)

    def drafted(self, **options):
        drafter = options.setdefault("candidate_generator", self.prophet())
        ids = self.generate(**{"max_draft_tokens": 8, **options})  # whatever passes take
        if isinstance(drafter, Prophet):
            assert drafter.stats.accepted > 0
        return self.plain, ids

    def attached(self):
        with rs.attach(self.model, self.prophet()):
            return self.plain, self.generate()

    def returned_cache(self):
        _, output = self.drafted(return_dict_in_generate=True)
        assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
        return self.plain, output.sequences

    def raised(self, where, at):
        """An exception of the drafter of one rank."""
        drafter = Raises(self.plain, where) if self.rank == at else self.prophet()
        return self.refused(candidate_generator=drafter)

    static_cache = partialmethod(drafted, cache_implementation="static")
    no_draft = partialmethod(raised, "draft", at=0)
    no_observation = partialmethod(raised, "observe", at=1)
    one_fails = partialmethod(raised, "draft", at=1)  # while the others go on
    after_exceptions = drafted

    def refused(self, **options):
        try:
            return self.plain, self.generate(**{"max_draft_tokens": 8, **options})
        except (LookupError, RuntimeError, ValueError) as error:
            return repr(error)


class Tensor(Cases):
    """Cases of tensor parallelism: all ranks have one text, and different drafters and clocks."""

    def __init__(self, folder: Path, rank: int, ranks: int):
        self.folder, self.ranks = folder, ranks
        self.model, self.windowed = (
            self.load(name, tp_plan="auto") for name in ("llama", "mistral")
        )
        self.own = self.model
        super().__init__(rank)

    def load(self, name: str, **split):
        config = DistributedConfig(**split)
        return AutoModelForCausalLM.from_pretrained(self.folder / name, distributed_config=config)

    def clocks(self):
        """With "auto", where wide passes are cheap by the clock of the first rank alone."""
        with passes_take(lambda tokens: float(tokens if self.rank else 1)):
            return self.drafted(max_draft_tokens="auto")

    def facts(self):
        """Where only some have probed the model before."""
        if self.rank:
            memo_of(self.model).clear()
        return self.drafted()

    def sampled(self):
        """With another seed at each rank; all ranks draw what the first draws."""
        options = {"do_sample": True, "temperature": 1.5, "top_k": 20}
        torch.manual_seed(0)
        plain = self.generate(**options)
        torch.manual_seed(self.rank)
        options |= {"return_dict_in_generate": True, "output_scores": True}
        output = self.generate(**options, candidate_generator=self.prophet(plain))
        assert len(output.scores) == NEW_TOKENS
        return plain, output.sequences

    def rows(self, repeats: int = 1, branches: int = 2):
        inputs = {name: each.repeat(repeats, 1) for name, each in padded_prompts(3).items()}
        given = {**inputs, "inputs": None}
        plain = self.generate(**given)
        drafter = Prophets(inputs, plain, 0.9, branches, seed=self.rank)
        return plain, self.generate(**given, candidate_generator=drafter, max_draft_tokens=64)

    def long_draft(self):
        """Drafts that take more than one exchange."""
        return self.rows(repeats=13, branches=12)

    def stop(self, drafter=None, **inputs):
        """By a criterion that stops earlier at later ranks; all stop where the first does."""
        first, own = ([StopAtCall(calls)] for calls in (18, 18 - 4 * self.rank))
        plain = self.generate(**inputs, stopping_criteria=first)
        drafter = drafter or self.prophet()
        return plain, self.generate(**inputs, stopping_criteria=own, candidate_generator=drafter)

    def rows_stop(self):
        """By a criterion that sees all rows at once."""
        return self.stop("auto", **padded_prompts(3), inputs=None)

    def one_drafter(self):
        """Only the first rank has one, which also reads the prompt."""
        given = rs.Drafter() if self.rank else rs.ReferenceCopy() | rs.TokenRecycling()
        inputs = {"inputs": PROMPT.repeat(1, 30)}
        return self.generate(**inputs), self.generate(**inputs, candidate_generator=given)

    def one_chain(self):
        """Only the first rank has one, whose drafts are verified as chains."""
        prompt_lookup = PromptLookupCandidateGenerator(num_output_tokens=5, max_length=512)
        return self.drafted(candidate_generator=rs.Drafter() if self.rank else prompt_lookup)

    def unread_states(self):
        """A source of hidden states, which is never asked."""
        return self.drafted(candidate_generator=self.prophet() | NeverAsked())

    def tables(self):
        """The contexts and best next tokens in the table of Token Recycling."""
        recycling = rs.TokenRecycling()
        self.generate(inputs=PROMPT.repeat(1, 5), candidate_generator=recycling)
        learned = recycling._table.entries()
        assert len(learned) > 32
        return learned.contexts, learned.tokens

    def boundary(self):
        """Past the length of the window, where another probe decides."""
        options = {**self.options, "max_new_tokens": 2 * WINDOW}
        plain = self.windowed.generate(PROMPT, **options)
        drafter = Prophet(plain, 0.9)
        return plain, self.windowed.generate(PROMPT, **options, candidate_generator=drafter)

    def speculative_retrieval(self):
        return self.refused(custom_generate=rs.knn_lm)

    def pipeline(self):
        """Layers that are spread over the ranks."""
        self.model = self.load("llama", pp_size=self.ranks)
        return self.refused(candidate_generator="auto")


class Sharded(Cases):
    """Cases of FSDP: each rank has a text of its own, and weights are collected for each pass."""

    def __init__(self, folder: Path, rank: int, ranks: int):
        config = DistributedConfig(fsdp_size=ranks)
        self.model, self.own = (
            AutoModelForCausalLM.from_pretrained(folder / "llama", **split)
            for split in ({"distributed_config": config}, {})
        )
        super().__init__(rank, (PROMPT + 11 * rank) % 97, new_tokens=(NEW_TOKENS, 8, 16)[rank])

    def plainly(self):
        return self.plain, self.generate()

    def default(self):
        return self.drafted(candidate_generator="auto", synced_gpus=True)

    def rollouts(self):
        """Sampled rows of two padded prompts, which end at different lengths at each rank."""
        inputs = {name: each.repeat_interleave(2, 0) for name, each in padded_prompts(2).items()}
        options = {**self.options, **inputs, "do_sample": True, "temperature": 0.5}
        options |= {"eos_token_id": [*range(8)], "pad_token_id": 0}
        torch.manual_seed(self.rank)
        plain = self.own.generate(**options)
        torch.manual_seed(self.rank)
        drafter = rs.ReferenceCopy() | rs.SiblingCopy() | rs.TokenRecycling()
        return plain, self.model.generate(**options, candidate_generator=drafter)


def run(rank: int, ranks: int, folder: Path, cases: list[str]) -> None:
    """Writes `RANK.json` into a folder: for each case, such as "tensor rows", the ids of plain
    decoding and those with drafts, or the exception; and what is printed into `RANK.log`."""
    sys.stdout = sys.stderr = (folder / f"{rank}.log").open("w", buffering=1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=20),
    )
    kinds, results = {}, {}
    for case in cases:
        kind, _, name = case.partition(" ")
        if kind not in kinds:
            kinds[kind] = {"tensor": Tensor, "sharded": Sharded}[kind](folder, rank, ranks)
        result = getattr(kinds[kind], name)()
        results[case] = (
            result if isinstance(result, str) else [np.asarray(ids).tolist() for ids in result]
        )
        # Written after each case: the next one may hang.
        (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()
