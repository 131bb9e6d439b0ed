"""The numbers that speculative retrieval was tuned with, and their reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RalmConstants:
    """Numbers of the request cache and of the stride scheduler."""

    # Ids in a request cache. Scoring more would take longer than the search that a guess saves.
    most_cached: int = 1 << 14
    # The time to score the ids of earlier requests, as a fraction of a search and of a step.
    earlier_cost: float = 0.05
    # Steps that one search verifies.
    longest_stride: int = 32
    # The last searches and steps that costs are estimated from.
    search_samples: int = 24
    step_samples: int = 16
    # Verifications that the paper's gamma is estimated from (w).
    published_window: int = 5
    # Steps with and without a concurrent search before contention is estimated. Single steps differ
    # too much, since some begin with another passage.
    contention_samples: int = 3
    # The limit of contention. From 2 on, a step beside a search saves nothing.
    most_contention: float = 4.0
    # The next request begins with this part of what was measured beyond the expected contention.
    # Other work may have caused it, but each new try costs several slow steps.
    contention_kept: float = 0.9
    # Pseudo-counts of right and wrong steps. Earlier requests may say nothing about a first guess.
    prior_right: float = 3.0
    prior_wrong: float = 0.3
    prior_wrong_first: float = 3.0
    # With every verification earlier counts shrink by this factor.
    fading: float = 0.95
    # Standard deviations by which gamma is taken lower where a wrong guess costs time.
    deviations: float = 3.0
    # The time that each further query adds, in searches for one query, until batches of two sizes
    # were measured. An exact search reads its vectors for several queries at once.
    per_query: float = 0.75
    per_query_exact: float = 0.25
    # The time of a guess from which no step is generated, as a fraction of a step.
    learning_cost: float = 0.01


CONSTANTS = RalmConstants()
