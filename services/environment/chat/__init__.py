"""Conversations as the model sees them: messages to text and tokens, and sampled text back to messages."""
