"""The commands of `jppo`, a module each, and what they share. They import nothing slow before they run."""

import tyro

EXIT_DIVERGED, EXIT_USAGE, EXIT_FAILED, EXIT_INTERRUPTED = 1, 2, 3, 130
EXITS = {"diverged": EXIT_DIVERGED, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}
Inline = tyro.conf.arg(name="")


def _whole_number(text: str) -> int:
    number = float(text)
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)


WholeNumber = tyro.constructors.PrimitiveConstructorSpec(  # an int that may be written 5e5 or 500_000
    nargs=1,
    metavar="INT",
    instance_from_str=lambda words: _whole_number(words[0]),
    is_instance=lambda value: isinstance(value, int) or value is None,
    str_from_instance=lambda value: ["preset" if value is None else str(value)],
)
