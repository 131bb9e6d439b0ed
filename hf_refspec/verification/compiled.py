"""A model's forward passes as `generate` compiles them over a static cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..transformers_names import compiles_passes
from .model_memo import memo_of

logger = logging.getLogger("hf_refspec")

# Each width and number of rows is compiled by itself, without a graph for any. torch gives up on a
# function after 8 graphs, which all models share; that limit had another name before torch 2.6.
_COMPILING = {
    "automatic_dynamic_shapes": False,
    "recompile_limit": 256,
    "cache_size_limit": 256,
    "accumulated_recompile_limit": 4096,
}
# With CUDA graphs torch runs, captures, and only then replays what it has compiled.
_CAPTURES = 2


class CompiledForward:
    """The forward pass of a model, compiled where `generate` would compile it."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.config = generation_config
        self._failed = "not compiled", repr(generation_config.compile_config)
        self._run_before: set[int] = set()  # widths
        # Whether passes are compiled: not after that has failed once.
        self.is_active = self._failed not in memo_of(model) and compiles_passes(
            model, dict(model_kwargs), generation_config
        )

    def __call__(
        self, model_inputs: dict[str, Any], width: int, shape: tuple[Any, ...]
    ) -> tuple[torch.Tensor, bool] | None:
        """The logits of all tokens of a pass, `(R, S, vocab_size)`, and whether it was compiled or
        captured just now, which takes longer; `None` if torch cannot compile it, and nothing has
        run."""
        from torch._dynamo.exc import TorchDynamoException  # takes long to import

        dynamo: Any = torch._dynamo.config
        options = {name: value for name, value in _COMPILING.items() if hasattr(dynamo, name)}
        graphs = _graphs()
        forward = self.model.get_compiled_call(self.config.compile_config)
        try:
            # Only the first pass of each width in a call may compile anything.
            with nullcontext() if width in self._run_before else dynamo.patch(options):
                logits: torch.Tensor = forward(**model_inputs, return_dict=True).logits
        except TorchDynamoException as error:
            self.is_active = False
            memo_of(self.model)[self._failed] = True
            logger.warning(
                "%s cannot be compiled, and runs as it is: %s",
                type(self.model).__name__,
                str(error).strip().partition("\n")[0],
            )
            return None
        self._run_before.add(width)
        compiled = _graphs() > graphs
        on_gpu = logits.device.type == "cuda"
        left = memo_of(self.model).setdefault(("captures left", shape), {})
        before = left.get(width, 0)
        left[width] = _CAPTURES if compiled else max(before - 1, 0)
        # The next pass of a CUDA graph writes over what this one has returned.
        return logits.clone() if on_gpu else logits, compiled or (before > 0 and on_gpu)


def _graphs() -> int:
    """How many graphs torch has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
