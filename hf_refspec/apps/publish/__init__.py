"""Published on the Hub beside datastores: a Space, and `generate(custom_generate=...)`."""
