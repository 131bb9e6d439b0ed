"""The real client gets plain `generate`'s texts, whatever is drafted and however it samples."""

import logging
from collections.abc import Iterator

import openai
import pytest
import requests
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from hf_refspec import ReferenceCopy, TokenRecycling
from hf_refspec.apps.serve.served_model import OutputPenalties
from hf_refspec.apps.serve.served_row import StopStrings
from hf_refspec.apps.shared.loading import layers_of
from hf_refspec.apps.shared.streams import PART_OF_CHARACTER
from tests.helpers.byte_model import changed
from tests.helpers.heads import with_mtp
from tests.helpers.running_server import NAME, Reply, RunningServer, serving

MESSAGES = ["one", "what is it?", "größer 🙂", "x = 1\n\n"]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_chats_answer_is_the_text_of_plain_generate(server, plain, message):
    answer = server.chat(message)
    expected = plain(message)
    assert answer.choices[0].message.content == expected
    assert Reply(server.chat(message, stream=True)).text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 32
    assert answer.usage.prompt_tokens == len(f"user: {message}\nassistant: ".encode())
    assert (answer.object, answer.model) == ("chat.completion", NAME)


@pytest.mark.parametrize("prompt", ["the cat", ["the cat"], [*b"the cat"]])
def test_a_completion_goes_on_from_a_text_or_its_ids(server, plain, tokenizer, prompt):
    if isinstance(prompt[0], int):
        prompt = tokenizer("the cat")["input_ids"]
    create = server.client.completions.create
    options = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 32}
    answer = create(**options)
    assert answer.choices[0].text == plain(prompt="the cat")
    reply = Reply(create(**options, stream=True))
    assert (reply.text, reply.finish_reason) == (plain(prompt="the cat"), "length")


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_are_answered_in_their_order(server, plain, tokenizer, as_ids):
    texts = ["the cat", "a dog"]
    prompts = tokenizer(texts)["input_ids"] if as_ids else texts
    create = server.client.completions.create
    options = {"model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": 12, "n": 2}
    answer = create(**options)
    expected = [plain(prompt=text, max_new_tokens=12) for text in texts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(map(len, tokenizer(texts)["input_ids"]))
    assert answer.usage.completion_tokens == 48
    assert Reply(create(**options, stream=True)).texts == expected


def test_a_message_may_come_in_parts_and_from_any_role_that_the_template_has(server):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and a dog"},
    ]
    create = server.client.chat.completions.create
    options = {"model": NAME, "temperature": 0, "max_tokens": 8}
    answer = create(messages=messages, **options)
    messages[0]["role"], messages[1]["content"] = "system", "a cat"
    same = create(messages=messages, **options)
    assert answer.choices == same.choices
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens


def prediction(content) -> dict:
    return {"prediction": {"type": "content", "content": content}}


@pytest.fixture(scope="module")
def drafting(speller, tokenizer) -> Iterator[RunningServer]:
    with serving(speller, tokenizer, max_draft_tokens=16) as running:
        yield running


def test_a_prediction_changes_the_usage_and_nothing_else(drafting, plain, stream):
    expected = plain("one", max_new_tokens=60)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    options |= {"max_tokens": 60, "stream": stream, **prediction(expected + " and more")}
    reply = Reply(drafting.chat("one", **options))
    assert reply.text == expected
    *others, last = reply.chunks
    assert not (stream and last.choices) and all(chunk.usage is None for chunk in others)
    details = last.usage.completion_tokens_details
    assert 30 < details.accepted_prediction_tokens < 60
    predicted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert predicted == len((expected + " and more").encode())
    without = drafting.chat("one").usage.completion_tokens_details
    assert (without.accepted_prediction_tokens, without.rejected_prediction_tokens) == (0, 0)


def test_a_prediction_of_parts_that_is_wrong_is_rejected(server, plain):
    parts = [{"type": "text", "text": text} for text in ("~~~", "~~~~")]
    answer = server.chat("one", **prediction(parts))
    assert answer.choices[0].message.content == plain("one")
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 7
    assert server.chat("one", **prediction("")).choices == answer.choices


def test_annotations_say_where_characters_of_an_answer_stand(speller, tokenizer, plain):
    whole = plain("one")
    source = ReferenceCopy(["nothing", whole[6:30]], tokenizer, include_prompt=False)
    with serving(speller, tokenizer, [source]) as server:
        assert "annotations" not in server.chat("one").choices[0].message.model_extra
        server.engine.source_names = {}
        for stop, end in ((None, 30), (whole[20:26], whole.find(whole[20:26]))):
            message = server.chat("one", stop=stop).choices[0].message
            place = {"source": "references", "document": 1, "offset": 0}
            place |= {"start_index": 6, "end_index": end}
            expected = [{"type": "copied_span", "copied_span": place}] if end > 6 else []
            *_, last = server.chat("one", stop=stop, stream=True)
            shown = message.to_dict()["annotations"], last.choices[0].delta.annotations
            assert (
                shown == (expected, expected)
                and message.content == plain("one")[: len(message.content)]
            )


def test_an_annotation_has_no_character_that_began_before_its_tokens(byte_llama, tokenizer):
    pytest.importorskip("llguidance")
    source = ReferenceCopy(tokenizer("é01234567")["input_ids"][1:], include_prompt=False)
    schema = {"name": "x", "schema": {"const": "aé01234567"}}
    with serving(byte_llama, tokenizer, [source]) as server:
        server.engine.source_names = {}
        form = {"type": "json_schema", "json_schema": schema}
        message = server.chat("one", response_format=form).choices[0].message
    [place] = [each["copied_span"] for each in message.to_dict()["annotations"]]
    assert message.content[place["start_index"] : place["end_index"]] == "01234567"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_text_ends_before_its_first_stop_string(server, plain, count, stream):
    whole = plain("one", max_new_tokens=64)
    stops = [whole[40:44], whole[20:23], "\n\n\n\n", "~~~"][:count]
    first = min(whole.find(each) for each in stops if each in whole)
    stops = stops if count > 1 else stops[0]
    reply = Reply(server.chat("one", max_tokens=64, stop=stops, stream=stream))
    assert (reply.text, reply.finish_reason) == (whole[:first], "stop")


def test_what_is_sampled_is_plain_generates_with_the_same_seed(server, plain):
    sampling = {"temperature": 0.9, "top_p": 0.8}
    for seed in (1, 2, 2**62):
        expected = plain("one", seed=seed, do_sample=True, **sampling)
        assert server.chat("one", seed=seed, **sampling).choices[0].message.content == expected
    texts = {server.chat("one", **sampling).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3  # without a seed they do not go on from the last one's


def test_what_a_request_leaves_out_is_the_models_own(speller, tokenizer, plain):
    config = changed(speller.generation_config, do_sample=True, temperature=0.5)
    with serving(
        changed(speller, generation_config=config), tokenizer, max_new_tokens=20
    ) as server:
        answer = server.client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "one"}], seed=3
        )
    expected = plain("one", seed=3, do_sample=True, temperature=0.5, max_new_tokens=20)
    assert answer.choices[0].message.content == expected


def test_more_tokens_than_the_server_or_the_context_allows_are_cut(speller, tokenizer):
    with serving(speller, tokenizer, max_new_tokens=20) as server:
        assert server.chat("one", max_completion_tokens=10**30).usage.completion_tokens == 20
        full = server.chat("x" * 2020).usage  # 2048 with the answer and the template
        assert full.completion_tokens < 20 and full.total_tokens == 2048


def test_the_end_of_text_is_a_stop(speller, tokenizer, plain):
    text = plain("one")
    ends = [2, tokenizer(text[10])["input_ids"][0]]
    config = changed(speller.generation_config, eos_token_id=ends)
    with serving(changed(speller, generation_config=config), tokenizer) as server:
        answer = server.chat("one")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(text[10]) + 1]


def test_models_and_health(server):
    assert [model.id for model in server.client.models.list()] == [NAME]
    assert server.client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match=f"this server has {NAME}"):
        server.client.models.retrieve("org/other")
    health = requests.get(server.url.removesuffix("/v1") + "/health", timeout=600).json()
    assert health == {"status": "ok", "running": 0, "waiting": 0}


def test_what_became_of_drafts_is_told_as_vllm_does(drafting, stream):
    """The identities are those that AIPerf demands."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    *others, last = Reply(drafting.chat("one", max_tokens=60, **options)).chunks
    assert not any(hasattr(chunk, "metrics") for chunk in others)
    told = last.metrics["speculative_decoding"]
    steps, histogram = told["num_spec_steps"], told["acceptance_histogram"]
    accepted, drafted = told["num_accepted_draft_tokens"], told["num_draft_tokens"]
    assert sum(histogram) == steps > 0 and histogram[-1] > 0
    assert sum(j * count for j, count in enumerate(histogram)) == accepted
    assert 0 < accepted <= drafted and accepted + steps < last.usage.completion_tokens
    assert told.pop("mean_acceptance_length") == pytest.approx(1 + accepted / steps)
    assert told.pop("draft_acceptance_rate") == pytest.approx(accepted / drafted)
    assert len(told) == 5 and told["num_spec_tokens"] is None
    assert not hasattr(drafting.chat("one", n=2), "metrics")


def test_options_of_the_chat_template_reach_it(speller, tokenizer, plain):
    thinks = changed(tokenizer, chat_template="{{ enable_thinking }} {{ style }}:")
    with serving(speller, thinks) as server:
        for options in ({"enable_thinking": False}, {"enable_thinking": True, "style": "x"}):
            answer = server.chat("one", extra_body={"chat_template_kwargs": options})
            prompt = f"{options['enable_thinking']} {options.get('style', '')}:"
            assert answer.choices[0].message.content == plain(prompt=prompt)


def test_the_documentation_has_every_field(server):
    url = server.url.removesuffix("/v1")
    assert "swagger" in requests.get(url + "/docs", timeout=600).text
    schema = requests.get(url + "/openapi.json", timeout=600).json()
    for path, field in [("chat/completions", "tools"), ("completions", "prompt")]:
        body = schema["paths"][f"/v1/{path}"]["post"]["requestBody"]
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        fields = schema["components"]["schemas"][name]["properties"]
        assert {"temperature", field} <= fields.keys()


def test_metrics_add_up(speller, tokenizer, plain):
    predicted = prediction(plain("one", max_new_tokens=60))
    with serving(speller, tokenizer) as server:
        usages = [server.chat("one", max_tokens=60, **predicted).usage, server.chat("two").usage]
        metrics = server.metrics()
        assert server.outcomes("length") == 2
    assert metrics["waiting_seconds_count"] == metrics["time_to_first_token_seconds_count"] == 2
    assert metrics["time_to_first_token_seconds_sum"] >= metrics["waiting_seconds_sum"] > 0
    assert metrics["prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert metrics["generated_tokens_total"] == 92
    passes = metrics["forward_passes_total"]
    assert metrics["mat"] == pytest.approx(92 / passes)
    sources = ("Prediction", "ReferenceCopy", "TokenRecycling")
    accepted = [metrics[f'accepted_draft_tokens_total{{source="{name}"}}'] for name in sources]
    assert accepted[0] == usages[0].completion_tokens_details.accepted_prediction_tokens
    assert sum(accepted) + passes == 92


def test_the_models_own_layers_draft_while_a_request_is_alone(
    speller, tokenizer, plain, tmp_path, caplog
):
    """Beside another one the other sources draft, which the log says once."""
    caplog.set_level(logging.WARNING, logger="hf_refspec")
    text = plain("one", max_new_tokens=60)
    ids = tokenizer(f"user: one\nassistant: {text}", return_tensors="pt")["input_ids"]
    model = with_mtp(speller, 1, tmp_path, ids)
    sources = [ReferenceCopy(), layers_of(model)]
    with serving(model, tokenizer, sources, max_rows=2, max_draft_tokens=8) as server:
        assert server.chat("one", max_tokens=60).choices[0].message.content == text
        accepted = server.metrics()['accepted_draft_tokens_total{source="HiddenStateDrafts"}']
        assert accepted > 10 and "hidden states" not in caplog.text
        answer = server.chat("one", max_tokens=60, n=2)
        assert [choice.message.content for choice in answer.choices] == [text, text]
    assert caplog.text.count("from hidden states: several texts are decoded together") == 1


@pytest.mark.parametrize("isolates", [False, True])
def test_isolated_requests_leave_nothing_behind_for_others(speller, tokenizer, plain, isolates):
    learned = TokenRecycling()
    with serving(speller, tokenizer, [learned], isolates=isolates) as server:
        for _ in range(2):
            assert server.chat("one").choices[0].message.content == plain("one")
        assert server.metrics()["generated_tokens_total"] == 64
    assert (len(learned) == 0) == isolates


PROMPT = len(b"user: one\nassistant: ")
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4}
BIASES = [[[70], 3.0], [[75], -100.0]]
PROCESSORS = {
    "penalties": (PENALTIES, [OutputPenalties(0.7, 0.4, PROMPT)]),
    "bias": ({"logit_bias": {"70": 3, "75": -100}}, [SequenceBiasLogitsProcessor(BIASES)]),
    "repetition": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "top_k": ({"top_k": 3}, []), "min_p": ({"min_p": 0.2}, []),
}  # fmt: skip


def test_each_penalty_is_openais():
    """logit - count * frequency - (count > 0) * presence"""
    scores = OutputPenalties(0.5, 0.25, 2)(torch.tensor([[3, 1, 1, 1, 2]]), torch.zeros(1, 5))
    assert scores.tolist() == [[0, -1.25, -0.75, 0, 0]]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9}])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_give_plain_generates_texts(server, plain, name, sampling):
    body, processors = PROCESSORS[name]
    asked = {"logits_processor": LogitsProcessorList(processors)} if processors else body
    if not processors:  # without sampling it has no effect
        sampling = {"temperature": 1.0, **sampling}
    own = {"do_sample": True, **sampling} if sampling else {}
    expected = plain("one", seed=5, **asked, **own)
    answer = server.chat("one", seed=5, **sampling, extra_body=body)
    assert answer.choices[0].message.content == expected != plain("one", seed=5, **own)


def test_n_rows_are_plain_generates_with_the_seeds_that_follow(speller, tokenizer, plain, stream):
    sampling = {"temperature": 0.9}
    expected = [plain("one", seed=seed, do_sample=True, **sampling) for seed in (7, 8, 9)]
    with serving(speller, tokenizer, max_rows=2) as server:
        reply = Reply(server.chat("one", n=3, seed=7, stream=stream, **sampling))
    assert reply.texts == expected
    assert stream or reply.chunks[0].usage.completion_tokens == 3 * 32


def test_logprobs_are_the_models_own_of_each_token(server, speller, tokenizer, stream):
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12, "logit_bias": {"70": 1}}
    reply = Reply(server.chat("one", stream=stream, **options))
    assert "".join(each.token for each in reply.tokens) == reply.text and len(reply.tokens) == 12
    ids = tokenizer(f"user: one\nassistant: {reply.text}", return_tensors="pt")["input_ids"]
    logits = speller(ids).logits[0].detach()
    logits[:, speller.generation_config.suppress_tokens] = -torch.inf
    expected = logits.log_softmax(-1)
    for place, each in enumerate(reply.tokens, start=PROMPT):
        assert each.logprob == pytest.approx(float(expected[place - 1, ids[0, place]]), abs=1e-4)
        top = expected[place - 1].topk(3).values.tolist()
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(top, abs=1e-4)
        assert bytes(each.bytes).decode() == each.token


@pytest.mark.parametrize("seed", range(3))
def test_bytes_of_logprobs_join_to_the_text_also_of_parts_of_characters(
    byte_llama, tokenizer, stream, seed
):
    """The model writes any byte."""
    with serving(byte_llama, tokenizer) as server:
        options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 40, "seed": seed}
        reply = Reply(server.chat("größer 🙂", stream=stream, temperature=1.5, **options))
    assert PART_OF_CHARACTER in reply.text  # which stands for bytes that are no character
    read = b"".join(bytes(one.bytes) for one in reply.tokens)
    assert read.decode(errors="replace") == reply.text
    tokens = reply.tokens + [other for one in reply.tokens for other in one.top_logprobs]
    special = tokenizer.all_special_tokens
    assert all(len(one.bytes) == (one.token not in special) for one in tokens)


def test_completions_describe_logprobs_in_lists(server):
    create = server.client.completions.create
    answer = create(model=NAME, prompt="the cat", logprobs=2, max_tokens=6, temperature=0)
    [choice] = answer.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [*range(6)]
    tops = zip(choice.logprobs.top_logprobs, choice.logprobs.token_logprobs, strict=True)
    assert all(len(top) == 2 and max(top.values()) == own for top, own in tops)


PIECES = st.lists(st.text("ab", min_size=1, max_size=3), max_size=12)
STRINGS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@given(PIECES, STRINGS)
@example(["a", "a", "b"], ["ab"])
@example(["a", "b", "ab"], ["abb", "b"])
def test_the_text_before_the_first_stop_string_is_passed_on_as_soon_as_it_is_known(pieces, strings):
    stop, passed, text = StopStrings(strings), "", ""
    for piece in pieces:
        passed, text = passed + stop.put(piece), text + piece
        places = [text.find(each) for each in strings if each in text]
        assert stop.found == bool(places)
        if places:
            assert passed == text[: min(places)]
            return
        held = text[len(passed) :]
        assert text == passed + held
        assert not held or any(each.startswith(held) for each in strings)
    assert passed + stop.end() == text
