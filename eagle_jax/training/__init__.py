"""Training of draft heads. Modules, layers and checkpoints are those that decoding runs."""
