"""Numbers in messages have their nouns."""

from hf_refspec.messages import counted


def test_one_thing_is_in_the_singular():
    prompts = [counted(count, "prompt") for count in (0, 1, 2000)]
    assert prompts == ["0 prompts", "1 prompt", "2,000 prompts"]
    assert [counted(count, "pass", "passes") for count in (1, 3)] == ["1 pass", "3 passes"]
