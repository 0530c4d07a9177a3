"""What records call things, in the plural."""

__all__ = ["plural"]


def plural(word: str) -> str:
    """The plural of an ordinary English noun, such as a sample's name."""
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        return word[:-1] + "ies"
    return word + "s"
