"""Places and spans by the words that people read."""

from canaryd.facts import Place, Span


def place(text: str) -> Place:
    """Return the place that reads "core 3", "cores 2 and 5", "core 3 twice", "all 2 threads", "SM 17" or "device"."""
    unit, *words = text.removeprefix("all ").replace(" twice", " and same").split()
    if text.startswith("all "):
        return Place(unit="threads", numbers=(int(unit),))
    numbers = tuple(int(word) for word in words if word.isdigit())
    return Place(unit={"cores": "core", "SM": "sm"}.get(unit, unit), numbers=numbers * (1 + ("same" in words)))


def line(number: int) -> Span:
    """Return the span of wrong indices that are all one."""
    return Span(first=number, last=number, distinct=1)


def lane(first: int) -> Span:
    """Return the span of three wrong indices of one lane of sixteen, from this one on."""
    return Span(first=first, last=first + 32, distinct=3, period=16)
