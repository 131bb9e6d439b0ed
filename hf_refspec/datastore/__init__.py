"""Datastores: token sequences on disk with a suffix index, to draft from."""
