"""What others' errors say, in one line."""


def first_line(error: BaseException) -> str:
    """Of its text; empty where it has none."""
    return (str(error).strip().splitlines() or [""])[0]


def kind_and_line(error: BaseException) -> str:
    """Its type's name before that."""
    return ": ".join(filter(None, (type(error).__name__, first_line(error))))
