"""What several applications need: the default model, prompts, text streams, live drafts."""
