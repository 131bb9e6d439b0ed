"""One rank of a model that is split over several processes, for `test_ranks.py`.

`python rank.py tensor|sharded RANK RANKS FOLDER CASE...` writes `FOLDER/RANK.json`: for each case,
the ids of plain decoding and those with drafts, or the exception.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from architectures import WINDOW, small
from calls import GREEDY, PROMPT, padded_prompts
from drafters import Prophet, Prophets
from torch import distributed
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.distributed import DistributedConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.generation.pass_costs import pass_costs
from hf_refspec.verification.model_memo import memo_of


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

    def draft(self, budget):
        self._count("draft")
        return super().draft(budget)

    def observe(self, observation):
        self._count("observe")
        super().observe(observation)

    def _count(self, where):
        self.calls += where == self.where
        if self.calls == 2:
            raise LookupError(f"no {where}")


class StopsAt(StoppingCriteria):
    """Stops every row at a length, as a limit of time would."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Tensor:
    """Cases of tensor parallelism: all ranks have one text, and different drafters and clocks."""

    def __init__(self, folder: Path, rank: int, ranks: int):
        self.rank, self.ranks, self.llama = rank, ranks, folder / "llama"
        self.model, self.windowed = (
            AutoModelForCausalLM.from_pretrained(
                folder / name, distributed_config=DistributedConfig(tp_plan="auto")
            )
            for name in ("llama", "mistral")
        )
        self.options = {**GREEDY, "max_new_tokens": 32}
        self.plain = self.generate(candidate_generator=None)

    def generate(self, inputs=PROMPT, **options):
        return self.model.generate(inputs, **{**self.options, **options})

    def prophet(self, seed=0, **others):
        return Prophet(self.plain, 0.8, seed=seed, **others)

    def compared(self, **options):
        drafted = self.generate(**options)
        if isinstance(drafter := options.get("candidate_generator"), Prophet):
            assert drafter.stats.forward_passes < 30  # some drafts were accepted
        return self.plain, drafted

    def clocks(self):
        """With "auto", where only one process has measured that wide passes are cheap."""
        wide, narrow = (65, 1) if self.rank == 0 else (1, 65)
        costs = pass_costs(self.model, "tree")
        for _ in range(30):
            costs.record(wide, 0.001)
            costs.record(narrow, 0.1)
        return self.compared(candidate_generator=self.prophet())

    def drafters(self):
        return self.compared(candidate_generator=self.prophet(self.rank), max_draft_tokens=8)

    def facts(self):
        """Where only some have probed the model before."""
        if self.rank:
            memo_of(self.model).clear()
        return self.compared(candidate_generator=self.prophet())

    def sampled(self):
        """With another seed at each rank; all ranks draw what the first draws."""
        options = {"do_sample": True, "temperature": 1.5, "top_k": 20}
        torch.manual_seed(0)
        plain = self.generate(**options)
        torch.manual_seed(self.rank)
        options |= {"return_dict_in_generate": True, "output_scores": True}
        output = self.generate(**options, candidate_generator=Prophet(plain, 0.8))
        assert len(output.scores) == 32
        return plain, output.sequences

    def rows(self):
        inputs = padded_prompts(3)
        plain = self.generate(**inputs, inputs=None)
        drafter = Prophets(inputs, plain, 0.8, seed=self.rank)
        return plain, self.generate(**inputs, inputs=None, candidate_generator=drafter)

    def rows_stop(self):
        """By a criterion that sees all rows at once."""
        return self.stop({**padded_prompts(3), "inputs": None}, "auto")

    def stop(self, inputs=None, drafter=None):
        """By a criterion that stops earlier at later ranks; all stop where the first does."""
        options, drafter = inputs or {}, drafter or self.prophet()
        first, own = ([StopsAt(length)] for length in (30, 30 - 4 * self.rank))
        plain = self.generate(**options, stopping_criteria=first)
        return plain, self.generate(**options, stopping_criteria=own, candidate_generator=drafter)

    def attached(self):
        with rs.attach(self.model, self.prophet(self.rank)):
            return self.compared()

    def static_cache(self):
        options = {"cache_implementation": "static"}
        return self.compared(candidate_generator=self.prophet(self.rank), **options)

    def returned_cache(self):
        output = self.generate(
            candidate_generator=self.prophet(self.rank), return_dict_in_generate=True
        )
        assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
        return self.plain, output.sequences

    def one_drafter(self):
        """Only the first rank has one, which also reads the prompt."""
        given = rs.Drafter() if self.rank else rs.ReferenceCopy() | rs.TokenRecycling()
        inputs = PROMPT.repeat(1, 30)
        plain = self.generate(inputs)
        return plain, self.generate(inputs, candidate_generator=given)

    def one_chain(self):
        """Only the first rank has one, whose drafts are verified as chains."""
        prompt_lookup = PromptLookupCandidateGenerator(num_output_tokens=5, max_length=512)
        return self.compared(candidate_generator=rs.Drafter() if self.rank else prompt_lookup)

    def tables(self):
        """The contexts and best next tokens in the table of Token Recycling."""
        recycling = rs.TokenRecycling()
        self.generate(PROMPT.repeat(1, 5), candidate_generator=recycling)
        learned = recycling._table.entries()
        assert len(learned) > 32
        return learned.contexts, learned.tokens

    def long_draft(self):
        """Drafts that take more than one exchange."""
        inputs = padded_prompts(5)
        inputs = {name: each.repeat(8, 1) for name, each in inputs.items()}
        plain = self.generate(**inputs, inputs=None)
        drafter = Prophets(inputs, plain, 0.9, branches=12, seed=self.rank)
        options = {"candidate_generator": drafter, "max_draft_tokens": 64}
        return plain, self.generate(**inputs, inputs=None, **options)

    def boundary(self):
        """Past the length of the window, where another probe decides."""
        options = {**self.options, "max_new_tokens": 4 * WINDOW}
        plain = self.windowed.generate(PROMPT, **options)
        drafter = Prophet(plain, 0.9)
        return plain, self.windowed.generate(PROMPT, **options, candidate_generator=drafter)

    def no_draft(self):
        return self.raised("draft", at=0)

    def no_observation(self):
        return self.raised("observe", at=1)

    def raised(self, where, at):
        """An exception of the drafter of one rank."""
        raises = Raises(self.plain, where)
        try:
            self.generate(candidate_generator=raises if self.rank == at else self.prophet())
        except (LookupError, RuntimeError) as error:
            return repr(error)
        return "nothing was raised"

    def after_exceptions(self):
        return self.compared(candidate_generator=self.prophet(self.rank))

    def speculative_retrieval(self):
        return self.refused(self.model, custom_generate=rs.knn_lm)

    def pipeline(self):
        """Layers that are spread over the ranks."""
        config = DistributedConfig(pp_size=self.ranks)
        model = AutoModelForCausalLM.from_pretrained(self.llama, distributed_config=config)
        return self.refused(model, candidate_generator="auto")

    def refused(self, model, **options):
        try:
            model.generate(PROMPT, **self.options, **options)
        except ValueError as error:
            return str(error)
        return "nothing was raised"


class Sharded:
    """Cases of FSDP: each rank has a text of its own, and weights are collected for each pass."""

    def __init__(self, folder: Path, rank: int, ranks: int):
        self.rank = rank
        config = DistributedConfig(fsdp_size=ranks)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder / "llama", distributed_config=config
        )
        self.own = AutoModelForCausalLM.from_pretrained(folder / "llama")
        self.prompt = (PROMPT + 11 * rank) % 97
        self.options = {**GREEDY, "max_new_tokens": (40, 12, 25)[rank]}
        self.plain = self.own.generate(self.prompt, **self.options)

    def generate(self, **options):
        return self.plain, self.model.generate(self.prompt, **{**self.options, **options})

    def plainly(self):
        return self.generate()

    def drafted(self):
        return self.generate(candidate_generator=Prophet(self.plain, 0.8, seed=self.rank))

    def default(self):
        return self.generate(candidate_generator="auto", synced_gpus=True)

    def attached(self):
        with rs.attach(self.model, Prophet(self.plain, 0.9)):
            return self.generate()

    def returned_cache(self):
        drafter = Prophet(self.plain, 1.0)
        _, output = self.generate(candidate_generator=drafter, return_dict_in_generate=True)
        assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
        return self.plain, output.sequences

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

    def static_cache(self):
        drafter = Prophet(self.plain, 0.8)
        return self.generate(candidate_generator=drafter, cache_implementation="static")

    def one_fails(self):
        """At one rank, while the others go on."""
        if self.rank != 1:
            return self.drafted()
        try:
            self.generate(candidate_generator=Raises(self.plain, "draft"))
        except LookupError as error:
            return repr(error)
        return "nothing was raised"


def main() -> None:
    kind, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=100),
    )
    cases = (Tensor if kind == "tensor" else Sharded)(folder, rank, ranks)
    names = [name for name in vars(type(cases)) if name in sys.argv[5:]]
    results = {}
    for name in names:
        result = getattr(cases, name)()
        results[name] = (
            result if isinstance(result, str) else [np.asarray(ids).tolist() for ids in result]
        )
        # Written after each case: the next one may hang.
        (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
