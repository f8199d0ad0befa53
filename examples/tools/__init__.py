"""A model with 0.9 M parameters learns to use a calculator for products that it cannot do in its head."""
