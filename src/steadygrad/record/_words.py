"""Words for messages and pages."""

__all__ = ["plural", "shown"]


def plural(word: str) -> str:
    """The plural of an ordinary English noun, such as a sample's name."""
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        return word[:-1] + "ies"
    return word + "s"


def shown(value: object) -> str:
    """A value as one short line of a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:56]} ..."
