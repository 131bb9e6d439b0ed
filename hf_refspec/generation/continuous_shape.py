"""What the drafts for `generate_batch` rely on in transformers' continuous batching: a transformers
that differs is refused."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import transformers

from ..verification.choice import RefusedCallError

_PACKAGE = "transformers.generation.continuous_batching."
# The methods that this file calls or replaces, with their parameters.
_METHODS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("continuous_api", "ContinuousBatchingManager", "start"): (),
    ("continuous_api", "ContinuousBatchingManager", "is_running"): (),
    ("continuous_api", "ContinuousBatchingManager", "_create_batch_processor"): (),
    ("continuous_api", "ContinuousBatchingManager", "_run_generation_loop"): (),
    ("continuous_api", "OutputRouter", "deliver"): ("output",),
    ("scheduler", "FIFOScheduler", "schedule_batch"): ("token_budget", "cache_budget"),
    ("scheduler", "PrefillFirstScheduler", "schedule_batch"): ("token_budget", "cache_budget"),
    ("input_outputs", "ContinuousBatchingIOs", "get_model_kwargs"): ("use_padding",),
    ("input_outputs", "ContinuousBatchingIOs", "prepare_batch_update"): (),
    ("model_runner", "ModelRunner", "compute_batch"): ("model", "batch_data"),
    ("requests", "RequestState", "update_and_check_completion"): ("token_id", "logprob"),
    ("requests", "RequestState", "to_generation_output"): (),
}
# Other names that these classes define or use.
_NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("continuous_api", "ContinuousBatchProcessor"): (
        *("inputs_and_outputs", "model_runner", "scheduler", "cb_config", "output_router"),
        *("schedule_batch", "get_model_kwargs", "compute_batch", "prepare_batch_update"),
    ),
    ("scheduler", "Scheduler"): ("active_requests", "waiting_requests"),
    ("input_outputs", "ContinuousBatchingIOs"): (
        *("num_request_in_batch", "requests_in_batch", "position_offset", "attention_mask"),
    ),
    ("input_outputs", "PagedAttentionArgs"): (
        *("logits_indices", "logits_processor_args", "position_ids", "attention_mask"),
    ),
    ("model_runner", "ModelRunner"): ("supports_logits_to_keep",),
    ("requests", "RequestState"): (
        *("request_id", "initial_tokens", "generated_tokens", "tokens_to_process", "streaming"),
        *("position_offset", "is_cpu_offloaded", "_eos_token_ids", "_new_tokens_limit"),
    ),
    ("requests", "FutureRequestState"): ("state", "has_new_token", "query_length"),
}


def check_transformers() -> None:
    """Refuses a transformers whose continuous batching is built otherwise."""
    differing = [
        f"{name}.{method}"
        for (module, name, method), parameters in _METHODS.items()
        if _parameters(_class(module, name), method) != parameters
    ]
    for (module, name), names in _NAMES.items():
        known = _names(_class(module, name))
        differing += [f"{name}.{each}" for each in names if each not in known]
    if differing:
        raise RefusedCallError(
            "`candidate_generator` with continuous batching needs transformers 5.17 to 5.23, and "
            f"in transformers {transformers.__version__} these differ: {', '.join(differing)}. "
            "Leave it out, or call `generate`."
        )


def _class(module: str, name: str) -> Any:
    try:
        return getattr(import_module(_PACKAGE + module), name, None)
    except ImportError:
        return None


def _parameters(kind: Any, method: str) -> tuple[str, ...] | None:
    function = getattr(kind, method, None)
    return None if function is None else tuple(inspect.signature(function).parameters)[1:]


def _names(kind: Any) -> set[str]:
    methods = [inspect.unwrap(each) for each in vars(kind or object).values() if callable(each)]
    used = {name for each in methods if inspect.isfunction(each) for name in each.__code__.co_names}
    return {*dir(kind), *getattr(kind, "__annotations__", ()), *used}
