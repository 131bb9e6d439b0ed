"""Corpora: documents, rows and chats that are read, tokenised, or cut into windows."""
