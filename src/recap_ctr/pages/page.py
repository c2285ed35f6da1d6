"""A page as one self-contained HTML file, which opens from disk, needs no network, and can be printed."""

from base64 import b64encode
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from recap_ctr.pages.charts import MARKS, Chart, mark_svg, to_csv, to_png, to_svg
from recap_ctr.storage.files import atomic_file, make_directory

PAGE = "report.html"
FIGURES = "figures"
# The browser fetches and sends nothing, whatever a value on the page may contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_TEMPLATE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="lead">$lead</p>
<nav>$links</nav>
$sections
<footer>Words: docs/glossary.md</footer>
</main>
<div id="tip" role="tooltip"></div>
<script>
$script</script>
</body>
</html>
""")


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ours: int | None = None
    """The index of the row that the page is about, which is set in bold."""
    note: str = ""

    def to_html(self) -> str:
        """Return the table as HTML."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.header)
        body = ""
        for index, row in enumerate(self.rows):
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
            style = ' class="ours"' if index == self.ours else ""
            body += f"<tr{style}>{cells}</tr>"
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
            f"{note}"
        )


@dataclass(frozen=True)
class Image:
    """A figure that was drawn elsewhere, embedded in the page."""

    name: str
    text: str
    """A description for readers who can't see the image."""
    png: bytes

    def to_html(self) -> str:
        """Return the image as HTML that holds its data."""
        data = b64encode(self.png).decode()
        return f'<figure id="{self.name}"><img alt="{escape(self.text)}" src="data:image/png;base64,{data}"></figure>'


@dataclass(frozen=True)
class Section:
    """A heading with text, tables, charts, images and code, in this order."""

    title: str
    text: str = ""
    points: tuple[str, ...] = ()
    """Sentences of a list."""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    images: tuple[Image, ...] = ()
    code: str = ""
    folded: bool = False
    """Whether only the heading shows until it is opened."""

    @property
    def anchor(self) -> str:
        """Return the section's name in links."""
        return "-".join(word for word in self.title.lower().split() if word.isalnum())

    def to_html(self) -> str:
        """Return the section as HTML."""
        heading = f"<h2>{escape(self.title)}</h2>"
        if self.folded:
            # A link into a folded part opens it, which one to the part itself would not.
            start = f'<section><details><summary>{heading}</summary><div id="{self.anchor}">'
            end = "</div></details></section>"
        else:
            start, end = f'<section id="{self.anchor}">{heading}', "</section>"
        parts = [start]
        if self.text:
            parts.append(f"<p>{escape(self.text)}</p>")
        if self.points:
            parts.append("<ul>" + "".join(f"<li>{escape(point)}</li>" for point in self.points) + "</ul>")
        parts += [table.to_html() for table in self.tables]
        parts += [_figure(chart) for chart in self.charts]
        parts += [image.to_html() for image in self.images]
        if self.code:
            parts.append(f"<pre>{escape(self.code)}</pre>")
        return "\n".join([*parts, end])


@dataclass(frozen=True)
class Page:
    """A title, the answer in one sentence, and the sections that support it."""

    title: str
    lead: str
    """The answer in one sentence."""
    sections: tuple[Section, ...] = field(default_factory=tuple)

    @property
    def charts(self) -> list[Chart]:
        """Return the charts of all sections."""
        return [chart for section in self.sections for chart in section.charts]

    def to_html(self) -> str:
        """Return the whole page as HTML."""
        package = files("recap_ctr.pages")
        return _TEMPLATE.substitute(
            policy=_POLICY,
            title=escape(self.title),
            lead=escape(self.lead),
            links="".join(
                f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in self.sections
            ),
            sections="\n".join(section.to_html() for section in self.sections),
            style=(package / "style.css").read_text(encoding="utf-8"),
            script=(package / "script.js").read_text(encoding="utf-8"),
        )

    def write(self, directory: Path) -> Path:
        """Write the page and its charts to `directory` and return the page's path.

        Each chart is written as CSV and, where matplotlib is installed, as PNG.
        """
        figures = directory / FIGURES
        make_directory(figures)
        for chart in self.charts:
            contents = {"csv": to_csv(chart).encode()}
            if find_spec("matplotlib") is not None:
                contents["png"] = to_png(chart)
            for suffix, content in contents.items():
                with atomic_file(figures / f"{chart.name}.{suffix}") as file:
                    file.write(content)
        with atomic_file(directory / PAGE) as file:
            file.write(self.to_html().encode())
        return directory / PAGE


def _figure(chart: Chart) -> str:
    legend = _legend(chart) if len(chart.series) > 1 else ""
    note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    return f'<figure id="{chart.name}"><strong>{escape(chart.title)}</strong>{to_svg(chart)}{legend}{note}</figure>'


def _legend(chart: Chart) -> str:
    entries = []
    for number, series in enumerate(chart.series):
        shape = "square" if series.kind in ("bars", "columns") else MARKS[number % len(MARKS)]
        key = f'<svg viewBox="0 0 12 12" aria-hidden="true">{mark_svg(shape, 6, 6, f"s{number % 8}")}</svg>'
        entries.append(f"<li>{key}{escape(series.name)}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'
