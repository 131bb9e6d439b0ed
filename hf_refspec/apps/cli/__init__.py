"""The commands of `hf-refspec`, a file for each family."""
