"""Stores: one kind of folder, on disk or on the Hub, for token sequences and vectors."""
