"""Retrievers: what finds passages for a query."""
