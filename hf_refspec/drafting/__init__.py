"""Drafters: where the draft tokens come from."""

from . import blend as blend  # it gives every drafter its `|`
