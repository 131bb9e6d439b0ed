"""Applications: each folder knows the library and `shared`, and no other application."""
