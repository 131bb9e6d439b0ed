"""A page on which a model answers plainly and with drafts, side by side."""
