"""Inputs with their right values, tried on the product: `python -m tests.cases FOLDER`."""
