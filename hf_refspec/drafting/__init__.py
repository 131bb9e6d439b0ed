"""Drafters: what each drafts from, and the blend of several.

A blend is a drafter and is made of all kinds of them, so `a | b` is defined here, above both.
"""

from .blend import Blend
from .contract import Drafter

Drafter.__or__ = lambda drafter, other: Blend([drafter, other])
Drafter.__ror__ = lambda drafter, other: Blend([other, drafter])
