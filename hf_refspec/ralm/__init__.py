"""Language models that retrieve while they generate, and retrieval that is speculated."""
