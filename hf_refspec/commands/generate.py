"""`hf-refspec generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from transformers import TextStreamer

from ..demo.default_model import load_model, load_tokenizer
from ..drafting.reference_copy import ReferenceCopy
from ..options import Option


def _draft_tokens(text: str) -> int | str:
    return text if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Streams the text to stdout, and prints the statistics to stderr."""

    model: Annotated[str, Option("a folder or a Hub id")]
    prompt_file: Annotated[Path, Option()]
    reference: Annotated[list[Path], Option("texts to copy from", nargs="+", metavar="FILE")] = (
        field(default_factory=list)
    )
    max_draft_tokens: Annotated[Any, Option(type=_draft_tokens, metavar="N")] = "auto"
    max_new_tokens: Annotated[int, Option()] = 256

    def run(self) -> int:
        prompt = self.prompt_file.read_text(encoding="utf-8")
        references = [path.read_text(encoding="utf-8") for path in self.reference]

        tokenizer = load_tokenizer(self.model)
        drafter = ReferenceCopy(references or None, tokenizer)
        model = load_model(self.model)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        model.generate(
            **inputs.to(model.device),
            max_new_tokens=self.max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            candidate_generator=drafter,
            max_draft_tokens=self.max_draft_tokens,
        )
        print(drafter.stats, file=sys.stderr)
        return 0
