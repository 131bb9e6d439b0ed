"""The commands of `hf-refspec`, a file for each; short ones of `store` share store.py."""
