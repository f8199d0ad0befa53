"""The door: the endpoints of OpenAI and Anthropic, behind which a rollout's policy answers and its tokens are kept."""
