"""The door: endpoints like OpenAI's and Anthropic's, at which a rollout's policy answers and its tokens are recorded."""
