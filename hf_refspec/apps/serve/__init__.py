"""An OpenAI-compatible server for one model, with drafting on."""
