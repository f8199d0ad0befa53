"""Chat templates and tokenizers of models, without torch: dataprep renders prompts, environments whole conversations."""
