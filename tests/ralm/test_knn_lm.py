"""A kNN-LM: the same text with every speculation, from the distribution of the paper."""

import math

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor

from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.knn_lm import Mixture
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.stats import RalmStats
from hf_refspec.retrieval.retriever import Retrieved
from tests.helpers.architectures import small
from tests.helpers.knn_texts import CORPUS, generate

SPECULATIONS = ["", "p", "s", "a", "ps", "pa", "sa", "psa", RalmSpeculation.published("psa")]


SCORES = {"return_dict_in_generate": True, "output_scores": True}


class TestTheSameTextWithEverySpeculation:
    @pytest.mark.parametrize("k", [1, 8, 100])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_greedy_and_sampled(self, byte_llama, inputs, store, k, do_sample):
        options = {"k": k, "do_sample": do_sample}
        plain = generate(byte_llama, inputs, store, speculation=None, **options)
        after_plain = torch.get_rng_state()
        for speculation in SPECULATIONS:
            ids = generate(byte_llama, inputs, store, speculation=speculation, **options)
            assert torch.equal(ids, plain), speculation
            assert torch.equal(torch.get_rng_state(), after_plain)

    @pytest.mark.parametrize(
        ("speculation", "k", "taken"),
        [
            (RalmSpeculation.published("s"), 200, True),
            (RalmSpeculation(), 8, True),
            (RalmSpeculation(), 200, False),
        ],
    )
    def test_the_next_entries_are_taken_as_published_or_of_few_neighbours(
        self, byte_llama, inputs, tokenizer, tmp_path, speculation, k, taken
    ):
        class Recorded(KnnDatastore):
            asked = 0

            def next_entries(self, ids):
                self.asked += 1
                return super().next_entries(ids)

        store = Recorded.build(CORPUS * 2, tokenizer, byte_llama, tmp_path / "s")
        plain = generate(byte_llama, inputs, store, speculation=None, k=k)
        ids = generate(byte_llama, inputs, store, speculation=speculation, k=k)
        assert torch.equal(ids, plain)
        assert (store.asked > 0) == taken

    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize(
        ("index", "options"),
        [("hnsw", {}), ("flat", {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3})],
    )
    def test_with_a_graph_or_processors_that_look_at_the_text(
        self, byte_llama, inputs, store, index, options, do_sample
    ):
        opened, options = KnnDatastore(store.path, index), options | {"do_sample": do_sample}
        plain = generate(byte_llama, inputs, opened, speculation=None, **options)
        assert torch.equal(generate(byte_llama, inputs, opened, **options), plain)

    @pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text", "mamba2", "qwen3_moe"])
    def test_on_other_caches_than_of_plain_attention(self, model_type, inputs, tokenizer, tmp_path):
        model = small(model_type, vocab_size=len(tokenizer))
        options = {"layer": "last_hidden"}
        store = KnnDatastore.build(CORPUS, tokenizer, model, tmp_path / "store", **options)
        for do_sample in (False, True):
            options = {"do_sample": do_sample, "k": 3}
            plain = generate(model, inputs, store, speculation=None, **options)
            assert torch.equal(generate(model, inputs, store, speculation="ps", **options), plain)


class TestTheDistribution:
    def test_is_the_weighted_sum_of_both(self, store):
        """Khandelwal et al. 2020, equations 2 and 3, in plain Python."""
        logits = torch.randn(259, generator=torch.Generator().manual_seed(0)) * 3
        found = store.search([store.keys[17] + 0.1], 12)[0]
        lambda_, temperature = 0.3, 5.0
        of_neighbours = [0.0] * 259
        for entry, score in zip(found.ids.tolist(), found.scores.tolist(), strict=True):
            of_neighbours[int(store.values[entry])] += math.exp(score / temperature)
        of_model = [math.exp(logit) for logit in logits.tolist()]
        mixed = Mixture(store, 12, lambda_, temperature).log_probs(logits, found).exp().tolist()
        for token in range(259):
            p_knn = of_neighbours[token] / sum(of_neighbours)
            p_lm = of_model[token] / sum(of_model)
            assert math.isclose(
                mixed[token], lambda_ * p_knn + (1 - lambda_) * p_lm, rel_tol=1e-4, abs_tol=1e-9
            )

    def test_is_the_models_with_lambda_0_and_the_neighbours_with_lambda_1(
        self, byte_llama, inputs, store, tokenizer
    ):
        plain = byte_llama.generate(**inputs, max_new_tokens=30)
        options = {"lambda_": 0.0, "max_new_tokens": 30}
        assert torch.equal(generate(byte_llama, inputs, store, **options), plain)
        prompt = tokenizer(CORPUS[0][:20], return_tensors="pt")
        ids = generate(byte_llama, prompt, store, lambda_=1.0, k=1)
        assert tokenizer.decode(ids[0]).startswith(CORPUS[0][:45])

    def test_keeps_what_probabilities_would_lose(self, store):
        logits = torch.zeros(259)
        logits[7] = -200.0
        found = Retrieved(np.array([0]), np.float32([0.0]))
        log_probs = Mixture(store, 1, 0.5, 1.0).log_probs(logits, found)
        assert log_probs[7] < -200 and log_probs.isfinite().all()

    def test_generates_what_a_loop_over_the_formula_does(self, byte_llama, inputs, store):
        ids, seen = inputs["input_ids"], []
        mlp = byte_llama.model.layers[-1].mlp
        handle = mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0][0, -1]))
        for _ in range(20):
            with torch.no_grad():
                p = 0.4 * byte_llama(ids).logits[0, -1].softmax(-1)
            distances = ((store.keys - seen[-1].numpy()) ** 2).sum(axis=1)
            nearest = np.argsort(distances, kind="stable")[:8]
            weights = np.exp(-distances[nearest] / 4)
            for token, weight in zip(store.values[nearest], weights / weights.sum(), strict=True):
                p[token] += 0.6 * weight
            ids = torch.cat([ids, p.argmax().reshape(1, 1)], dim=-1)
        handle.remove()
        assert torch.equal(generate(byte_llama, inputs, store, max_new_tokens=20), ids)


class TestGenerate:
    def test_returns_a_dict_with_the_cache_of_all_but_the_last_and_fills_stats(
        self, byte_llama, inputs, store
    ):
        stats = RalmStats()
        output = generate(byte_llama, inputs, store, return_dict_in_generate=True, ralm_stats=stats)
        assert torch.equal(output.sequences, generate(byte_llama, inputs, store))
        length = output.sequences.shape[1]
        assert output.past_key_values.get_seq_length() == length - 1
        assert stats.steps == length - inputs["input_ids"].shape[1]

    @pytest.mark.parametrize("k", [1, 200])
    def test_speculates_several_tokens_a_search(self, byte_llama, inputs, store, k):
        stats = RalmStats()
        options = {"k": min(k, len(store)), "ralm_stats": stats}
        generate(byte_llama, inputs, store, speculation="p", **options)
        assert stats.searches < stats.steps
        assert stats.verified > 0

    def test_looks_up_all_entries_where_there_are_fewer_than_k(self, byte_llama, inputs, store):
        expected = generate(byte_llama, inputs, store, k=len(store))
        assert torch.equal(generate(byte_llama, inputs, store, k=10**6), expected)

    def test_goes_on_from_a_cache(self, byte_llama, inputs, store):
        expected = generate(byte_llama, inputs, store)
        cache = DynamicCache(config=byte_llama.config)
        with torch.no_grad():
            byte_llama(inputs["input_ids"][:, :-1], past_key_values=cache)
        assert torch.equal(generate(byte_llama, inputs, store, past_key_values=cache), expected)

    def test_samples_with_the_temperature_of_a_generation_config(self, byte_llama, inputs, store):
        config = GenerationConfig(temperature=0.01, do_sample=True, max_new_tokens=20)
        ids = generate(byte_llama, inputs, store, generation_config=config, max_new_tokens=20)
        assert torch.equal(ids, generate(byte_llama, inputs, store, max_new_tokens=20))


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"k": 0}, ValueError, "k must be at least 1"),
            ({"lambda_": 1.5}, ValueError, "lambda_ must be from 0 to 1"),
            ({"lambda_": math.nan}, ValueError, "lambda_ must be from 0 to 1"),
            ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
            ({"speculation": "x"}, ValueError, "speculation must be of the letters"),
            ({"num_beams": 2}, ValueError, "`knn_lm` cannot be combined with `num_beams=2`"),
            ({"use_cache": False}, ValueError, "`knn_lm` cannot be combined with `use_cache"),
            ({"cache_implementation": "static"}, ValueError, "`knn_lm`.*a static cache"),
            (SCORES, ValueError, "output_scores"),
            ({"guidance_scale": 2.0}, ValueError, "Pass `speculation=None`"),
            ({"num_return_sequences": 2, "do_sample": True}, ValueError, "2 rows"),
        ],
    )
    def test_is_refused(self, byte_llama, inputs, store, options, error, message):
        with pytest.raises(error, match=message):
            generate(byte_llama, inputs, store, **options)


class Double(LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.sums = scores.exp().sum(dim=-1)
        return scores * 2


def test_processors_see_log_probabilities(byte_llama, inputs, store):
    processor = Double()
    generate(byte_llama, inputs, store, logits_processor=[processor], max_new_tokens=3)
    assert torch.allclose(processor.sums, torch.ones(1), atol=1e-5)
