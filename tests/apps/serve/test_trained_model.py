"""The default model, which has learned to write: an edit with the file as its prediction."""

from __future__ import annotations

from running_server import NAME, serving

from hf_refspec.apps.shared.default_model import load

FILE = """\
import json

class Basket:
    def __init__(self, tax=0.19):
        self.items = []
        self.tax = tax

    def net(self):
        return sum(item.price * item.count for item in self.items)
"""
PROMPT = f"Before:\n```python\n{FILE}```\n\nAfter, with Basket renamed to Cart (“🛒”):\n```python\n"


def test_an_editors_prediction_is_accepted_where_it_is_right():
    model, tokenizer = load(device="cpu")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "class Cart:" in expected
    prediction = {"prediction": {"type": "content", "content": FILE}}
    options = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 48, "stream": True}
    options |= {"stream_options": {"include_usage": True}, "extra_body": prediction}
    with serving(model, tokenizer) as server:
        chunks = list(server.client.completions.create(**options))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 20
