"""Retrievers, which find passages for a query."""
