"""A transformers `CandidateGenerator` receives what transformers would send it."""

import numpy as np
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.candidates import CandidateChain
from hf_refspec.drafting.contract import Call
from tests.helpers.calls import GREEDY, PROMPT, assert_lossless
from tests.helpers.drafters import Prophet


class Scripted(CandidateGenerator):
    """Drafts three tokens of the target text, the third of them wrong at every other step."""

    def __init__(self, target_ids):
        self.target_ids = target_ids
        self.asked = []
        self.updates = []

    def get_candidates(self, input_ids, **kwargs):
        self.asked.append(input_ids[0].tolist())
        length = input_ids.shape[1]
        draft = self.target_ids[:, length : length + 3].clone()
        if len(self.asked) % 2 and draft.shape[1] == 3:
            draft[0, 2] = (draft[0, 2] + 1) % 97
        return torch.cat([input_ids, draft], dim=-1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.updates.append((input_ids[0].tolist(), scores.clone(), num_matches))


def test_it_receives_the_text_the_matches_and_the_scores_of_its_candidates(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    generator = Scripted(plain)
    assert_lossless(llama, generator)
    ids = plain[0].tolist()
    length = PROMPT.shape[1] + 1
    for step, (asked, update) in enumerate(zip(generator.asked, generator.updates, strict=True)):
        assert asked == ids[:length]
        new_ids, scores, matches = update
        length = min(length + (3 if step % 2 == 0 else 4), len(ids))
        assert new_ids == ids[:length]
        assert matches == len(new_ids) - len(asked) - 1
        with torch.no_grad():
            expected = llama(torch.tensor([new_ids[:-1]])).logits[:, -matches - 1 :]
        torch.testing.assert_close(scores[:, : matches + 1], expected, rtol=1e-3, atol=1e-4)
        assert scores.shape[1] == 1 + min(3, len(ids) - len(asked) - 1) or length == len(ids)


def test_its_drafts_are_cut_to_the_budget(llama):
    generator = Scripted(llama.generate(PROMPT, **GREEDY))
    assert_lossless(llama, generator, max_draft_tokens=1)
    assert max(scores.shape[1] for _, scores, _ in generator.updates) == 2


class Sure(Scripted):
    """Drafts a wrong third token, and gives the logits of its tokens along."""

    def get_candidates(self, input_ids, **kwargs):
        self.asked.append(0)
        candidate_ids, _ = super().get_candidates(input_ids)
        draft = candidate_ids[0, input_ids.shape[1] :]
        logits = torch.zeros(1, len(draft), 97)
        logits[0, torch.arange(len(draft)), draft] = 5.0
        return candidate_ids, logits


def test_its_logits_are_its_estimates(llama):
    chain = CandidateChain(Sure(llama.generate(PROMPT, **GREEDY)))
    with drafter_call(chain, [PROMPT[0].numpy()], 97):
        probs = chain.draft(8, Call()).probs
    each = np.exp(5.0) / (np.exp(5.0) + 96)
    np.testing.assert_allclose(probs, [each, each**2, each**3], rtol=1e-5)


def test_in_a_blend_it_is_told_of_its_own_candidates_alone(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    generator = Scripted(plain)
    assert_lossless(llama, Prophet(plain, accuracy=1.0) | generator, max_draft_tokens=16)
    for step, (ids, scores, matches) in enumerate(generator.updates):
        left = plain.shape[1] - len(ids)
        assert scores.shape[1] == 4 or left == 0
        assert matches == (3 if step % 2 else 2) or left == 0
    assert len(generator.updates) > 1
