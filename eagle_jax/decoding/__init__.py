"""Decoding: verification, the step and the loop around it."""
