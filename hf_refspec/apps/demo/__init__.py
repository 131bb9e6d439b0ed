"""The demo: a small model answers plainly and drafted."""
