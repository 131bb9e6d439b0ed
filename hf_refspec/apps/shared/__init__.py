"""What several applications need: loading of models, prompts, text streams, live drafts."""
