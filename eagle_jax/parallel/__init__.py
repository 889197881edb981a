"""Meshes, and the tables that place arrays on them."""
