"""The structures of the papers over token sequences, compiled by numba.

llma.py           LLMA's match (arXiv 2304.04487) and, beyond it, a tree of all matches
rest_trie.py      REST's trie (arXiv 2311.08252) and, beyond it, several match lengths
crest.py          CREST's n-grams (arXiv 2408.04678) and the table of their draft trees
best_first.py     the growth of all these trees
token_buffer.py   texts that grow; suffix_array.py: long, fixed ones
"""
