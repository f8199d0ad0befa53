"""`grpo init`: looks at a model, data and a reward, and writes a configuration that fits them."""
