"""What generators and environments share: tickets being worked on, the tokens of completions, and the records made of them."""
