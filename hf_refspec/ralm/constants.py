"""The numbers that speculative retrieval was tuned with, and their reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RalmConstants:
    """Numbers of the request cache, of the stride scheduler and of kept passages."""

    most_cached: int = 1 << 14  # ids; scoring more takes longer than the search that a guess saves
    earlier_cost: float = 0.05  # of a search and of a step, to score the ids of earlier requests
    longest_stride: int = 32  # steps that one search verifies
    search_samples: int = 24  # the last searches that costs are estimated from
    step_samples: int = 16  # and the last steps
    published_window: int = 5  # verifications that the paper's gamma is estimated from (w)
    # Steps with and without a concurrent search before contention is estimated. Single steps differ
    # too much, since some begin with another passage.
    contention_samples: int = 3
    most_contention: float = 4.0  # from 2 on, a step during a search saves nothing
    # The next request begins with this part of what was measured beyond the expected contention.
    # Other work may have caused it, but each new try costs several slow steps.
    contention_kept: float = 0.9
    prior_right: float = 3.0  # pseudo-counts of right and wrong steps
    prior_wrong: float = 0.3
    prior_wrong_first: float = 3.0  # earlier requests may say nothing about a first guess
    fading: float = 0.95  # by which each verification reduces earlier counts
    deviations: float = 3.0  # by which gamma is taken lower where a wrong guess costs time
    # The time that each further query adds, in searches for one query, until batches of two sizes
    # were measured. An exact search reads its vectors for several queries at once.
    per_query: float = 0.75
    per_query_exact: float = 0.25
    learning_cost: float = 0.01  # of a step, for a guess from which no step is generated
    # For keys and values of passages: a quarter of the weights' bytes, but no less than those of 43
    # passages of 256 tokens with a model of 135M parameters in float32; on a GPU no more than a
    # quarter of its free memory.
    passage_fraction: float = 0.25
    passage_bytes: int = 1 << 29


CONSTANTS = RalmConstants()
