"""Grammars: the processor that constrains, and drafts of what they force."""
