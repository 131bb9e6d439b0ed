"""Verification: forward passes of the target model over drafts, with the cache kept in step."""
