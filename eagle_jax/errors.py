"""The errors that a user can cause and mend. A command shows each as one line and exits with 2.

An error says what was given, what was expected and what to do. Errors of a part's own (a checkpoint's, a
mesh's) derive from `EagleError` too; anything else that is raised is a defect of the library and keeps its
traceback.
"""


class EagleError(ValueError):
    """What was asked for cannot be done as asked; the message is the whole explanation."""


class ConfigError(EagleError):
    """A configuration, or the command line, is wrong: names the key, what was given and what is allowed."""


class RequestError(EagleError):
    """One request cannot be served: an empty prompt, one longer than the context, a token id out of range."""
