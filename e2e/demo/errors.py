"""What can go wrong in the demo itself. The text says what happened and what to do."""


class DemoError(Exception):
    """The demo cannot go on, or the conversation did not show what it should."""
