"""The numbers that the budget of "auto" was tuned with, and their reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetConstants:
    """Numbers of [`~budget.AutoBudget`]."""

    # The part of the time that drafts may lose, and the plain steps that they may lose in advance,
    # so that a call can try them from its first pass on: together about three plain steps of a call
    # of 100 tokens. A call that ends early loses a larger part.
    loss: float = 0.015
    advance: float = 1.5
    least_advance: float = 0.5  # a call that fails does not end drafting for good
    # The most plain steps that earlier gains may pay for, twice the dearest pass. Without a limit,
    # a running batch would pay for wrong drafts for as long as right ones came before.
    most_affordable: float = 100.0
    disturbed: float = 2.0  # a pass counts as at most this multiple of its usual cost
    # The part of what is affordable that one pass may stake; the pass over the fewest nodes may
    # stake all. More tries longer drafts, less leaves something for others where the first fail.
    stake: float = 0.5
    # After this number of drafts in a row that were not worth verifying, drafting takes this part
    # of the time. Less patience saves time on text that repeats nothing, and misses the first
    # repetition of others; more drafting notices sooner that drafts pay again.
    patience: int = 8
    drafting_fraction: float = 0.005
    # The most that a draft is booked with, in plain steps: an assistant, which reads the prompt for
    # its first draft, has a ledger of its own.
    dearest_draft: float = 0.05
    # A draft must promise to be faster than none by this factor. More misses small gains, less
    # verifies drafts whose estimates are a little too high.
    margin: float = 1.05
    # A row this far ahead of another is e times less likely to be the last of its call to end. Less
    # leaves the rows that are ahead without drafts sooner.
    lead: float = 4.0
    horizon: float = 8.0  # passes to come in which a row is taken to gain as much as now


@dataclass(frozen=True)
class CostConstants:
    """Numbers of [`~pass_costs.PassCosts`]. Errors, noise and drifts are standard deviations of the
    logarithm of a cost: 0.1 is about ten percent."""

    growth_error: float = 0.2  # of each doubling; more believes the first measurements
    own_error: float = 0.1  # of each size by itself; more infers less from other sizes
    noise: float = 0.12  # of two passes of one size, on a shared machine
    first_noise: float = 0.3  # of the first pass of a size, which may set up memory or kernels
    very_first_noise: float = 1.2  # of the first pass of all, which nothing can be compared with
    # A pass that takes this many standard deviations longer than expected was disturbed by other
    # load, and counts the less the longer it took. Less would discard true measurements.
    disturbed: float = 2.0
    # The change from pass to pass of all costs together (texts grow, the machine is shared) and of
    # each: an old measurement is less sure, and is repeated if the size might pay.
    drift: float = 0.03
    own_drift: float = 0.002
    # The standard deviations by which an uncertain size is assumed cheaper, so that it is tried; and
    # dearer, where the question is whether it is affordable.
    optimism: float = 0.5
    caution: float = 0.5
    # A plain step costs the median of the last ones at texts of a similar length, once a few are
    # known. It is measured again after some passes if they say that it has changed by more.
    plain_steps: int = 5
    few_plain_steps: int = 3
    passes_between: int = 8
    changed: float = 0.3
    # Lengths are similar up to this number of tokens, and from each doubling to the next. From one
    # class of lengths to another all costs may change by this.
    similar_length: int = 1024
    length_change: float = 1.0
    # A pass is padded to a larger size that took less time by this part, in at least these passes.
    padding_gain: float = 0.05
    padding_passes: int = 3


BUDGET = BudgetConstants()
COSTS = CostConstants()
