"""A hook of mkdocs: links that lead out of docs/ work in the site, too.

On GitHub a page may link to any file of the repository. In the site, a figure or a data file that a page links to is
copied along, and a link to another Markdown file becomes plain text.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#]+)\)")
ROOT = Path(__file__).parents[1]
FOLDER = "repository"


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to."""
    targets = {
        target
        for page in Path(config["docs_dir"]).rglob("*.md")
        for _, target in LINK.findall(page.read_text(encoding="utf-8"))
    }
    for target in sorted(targets):
        path = ROOT / target
        if path.is_file() and path.suffix != ".md":
            files.append(File.generated(config, f"{FOLDER}/{target}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to the copies in the site."""
    up = "../" * page.file.src_uri.count("/")

    def rewritten(match: re.Match[str]) -> str:
        text, target = match.groups()
        if (Path(config["docs_dir"]) / target).exists():  # It only looked like one that leaves docs/.
            return match[0]
        is_copied = files.get_file_from_path(f"{FOLDER}/{target}") is not None
        return f"[{text}]({up}{FOLDER}/{target})" if is_copied else text

    return LINK.sub(rewritten, markdown)
