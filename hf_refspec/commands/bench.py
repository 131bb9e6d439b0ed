"""`hf-refspec bench` and `hf-refspec ablate`."""
