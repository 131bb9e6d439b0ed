"""Drafters: where the draft tokens come from."""
