"""KV caches behind one interface."""
