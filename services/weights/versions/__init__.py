"""Weights as versions: immutable objects, whole (`anchor`) or as the bits that changed (`delta`), and a store of them."""
