"""What the commands share towards the person or script at the other end: prompts in, answers out.

Nothing here imports JAX: a command explains itself, and finds mistakes in its arguments, before it loads
anything.
"""
