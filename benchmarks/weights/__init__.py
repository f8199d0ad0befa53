"""Weights as versions."""
