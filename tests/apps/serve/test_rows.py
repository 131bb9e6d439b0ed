"""Several requests are decoded together, each as if it were alone."""

from __future__ import annotations

import openai
import pytest
from running_server import Slow, serving, streamed, wait_until

from hf_refspec.apps.serve.served_model import OutputPenalties

MESSAGES = ["one", "what is it?", "größer 🙂", "a longer question than the others are, by far"]


def test_answers_that_are_decoded_together_are_those_of_plain_decoding(
    speller, tokenizer, plain, pool
):
    def ask(number: int) -> str:
        message = MESSAGES[number % 4]
        options = {"seed": number, "temperature": 1.0} if number % 3 == 0 else {}
        if number % 2:
            return streamed(server.chat(message, stream=True, **options))
        return server.chat(message, **options).choices[0].message.content

    with serving(speller, tokenizer, max_waiting=50, max_rows=4) as server:
        together = list(pool.map(ask, range(16)))
        alone = [ask(number) for number in range(16)]
    assert together == alone
    greedy = [number for number in range(16) if number % 3]
    assert [together[n] for n in greedy] == [plain(MESSAGES[n % 4]) for n in greedy]


def test_a_short_answer_ends_while_a_long_one_goes_on(speller, tokenizer):
    with serving(speller, tokenizer, [Slow()], max_rows=2) as server:
        long = server.chat("one", stream=True, max_tokens=900)
        next(iter(long))
        wait_until(lambda: server.engine.running == 1)
        assert server.chat("two", max_tokens=4).usage.completion_tokens == 4
        assert server.engine.running == 1
        long.close()
        wait_until(lambda: server.engine.running == 0)


def test_requests_wait_where_all_rows_are_taken(speller, tokenizer, pool):
    with serving(speller, tokenizer, [Slow()], max_rows=2) as server:
        streams = [server.chat("one", stream=True, max_tokens=900) for _ in range(2)]
        wait_until(lambda: server.engine.running == 2)
        third = pool.submit(server.chat, "two", max_tokens=4)
        wait_until(lambda: server.engine.waiting == 1)
        assert server.metrics()["running_requests"] == server.engine.running == 2
        streams[0].close()
        assert third.result().usage.completion_tokens == 4
        streams[1].close()


def test_metrics_say_how_long_requests_waited(speller, tokenizer):
    with serving(speller, tokenizer, max_rows=2) as server:
        server.chat("one", max_tokens=4)
        metrics = server.metrics()
    assert metrics["waiting_seconds_count"] == metrics["time_to_first_token_seconds_count"] == 1
    assert metrics["time_to_first_token_seconds_sum"] >= metrics["waiting_seconds_sum"] > 0


@pytest.mark.parametrize("isolates", [False, True])
def test_a_prompt_that_begins_like_another_is_not_read_again_unless_isolated(
    speller, tokenizer, isolates
):
    with serving(speller, tokenizer, isolates=isolates, max_rows=2) as server:
        shared = []
        begin = server.engine._finish

        def recorded(text, failed=False):
            shared.append(text.shared_tokens)
            begin(text, failed)

        server.engine._finish = recorded
        for _ in range(2):
            server.chat("a question of more than a few tokens", max_tokens=4)
        wait_until(lambda: len(shared) == 2)
    assert (shared[1] > 0) == (not isolates)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_requests_processor_ends_that_request_alone(
    speller, tokenizer, plain, monkeypatch, stream
):
    def fail(self, input_ids, scores):
        if len(input_ids[0]) > 24:
            raise ValueError("of this request")
        return scores

    monkeypatch.setattr(OutputPenalties, "__call__", fail)
    with serving(speller, tokenizer, max_rows=2) as server:
        other = server.chat("one", stream=True, max_tokens=200)
        first = next(other)
        with pytest.raises(openai.APIError, match="the server failed on this request"):
            streamed(server.chat("two", frequency_penalty=1, stream=stream))
        assert streamed([first, *other]) == plain("one", max_new_tokens=200)
        assert server.outcomes("error") == 1
