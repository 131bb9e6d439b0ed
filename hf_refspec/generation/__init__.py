"""The decoding loop: rows, acceptance, the budget, and what is refused."""
