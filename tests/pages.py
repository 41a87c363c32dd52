"""Pages as a text browser meets them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br"}
ADDRESSES = ("src", "href", "xlink:href", "action", "data")


class Page(HTMLParser):
    """The elements of a page with their attributes, and its words, in order; all that opens closes."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._shown: list[str] = []
        self._open: list[str] = []
        self.feed(document)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)
            if "details" not in self._open:
                self._shown.append(data)

    @property
    def tags(self) -> list[str]:
        """The name of every element."""
        return [tag for tag, _ in self.elements]

    @property
    def addresses(self) -> list[str | None]:
        """All that a browser would fetch, or offer to follow."""
        return [value for _, given in self.elements for name, value in given.items() if name in ADDRESSES]

    @property
    def text(self) -> str:
        """All words, as if the page's lines had never been broken."""
        return unwrapped(" ".join(self.words))

    @property
    def shown(self) -> str:
        """The words that are seen before anything is opened."""
        return unwrapped(" ".join(self._shown))


def unwrapped(text: str) -> str:
    """Return a text as if its lines had never been broken."""
    return " ".join(text.split())
