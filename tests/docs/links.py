"""Dead links of a folder of HTML pages."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class PageParser(HTMLParser):
    """Links and anchors of an HTML page, as far as it has been fed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]


def read_page(path: Path) -> PageParser:
    parser = PageParser()
    parser.feed(path.read_text())
    return parser


def find_dead_links(folder: Path) -> list[str]:
    """Return a line for each link to a file or anchor that the folder lacks; ignore other sites."""
    pages = {path: read_page(path) for path in sorted(folder.rglob("*.html"))}
    return [
        f"{path.relative_to(folder)}: {link}"
        for path, page in pages.items()
        for link in page.links
        if not urlsplit(link).netloc and not is_alive(path, link, pages)
    ]


def is_alive(path: Path, link: str, pages: dict[Path, PageParser]) -> bool:
    """Return whether a link of a page leads to a file, and to an anchor if it names one."""
    parts = urlsplit(link)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    anchor = unquote(parts.fragment)
    if not anchor:
        return target.is_file()
    return target in pages and anchor in pages[target].anchors


def list_linked_pages(path: Path) -> Iterator[Path]:
    """Yield the files of the same site to which a page links."""
    for link in read_page(path).links:
        parts = urlsplit(link)
        if parts.path and not parts.netloc:
            yield (path.parent / unquote(parts.path)).resolve()
