"""The decoder-only target, its layers and attention."""
