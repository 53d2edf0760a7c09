"""The two errors that traces raise."""


class TraceError(ValueError):
    """A trace, or what was asked of it, is wrong.

    The message starts with the file that is at fault (or the argument, where no file is involved) and names the field.
    """


class CaptureError(TraceError):
    """The trace's capture level lacks what was asked for.

    The message says which capture levels have it.
    """
