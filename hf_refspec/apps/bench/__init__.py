"""`hf-refspec bench`: whether drafts pay for a model and prompts of your own."""
