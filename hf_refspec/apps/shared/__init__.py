"""Shared by the applications: loading of models, prompts, text streams, live drafts."""
