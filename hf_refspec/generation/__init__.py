"""The decoding loop: calls, rows, the sizes of drafts, and acceptance."""
