"""The default model, and the demo that runs on it."""
