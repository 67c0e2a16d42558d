"""Hooks of mkdocs.yml: publishes README.md and other pages that lie outside of docs/, and files that pages link to.
The site's name is that of the project with its version.

Links in pages are those of the repository, so that they work on GitHub; here they become the site's.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages outside of docs/, each with its name in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "fastgen/models/demo/data/README.md": "demo-model.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
NESTED = re.compile(r"^  (?=- )", re.MULTILINE)  # two spaces are enough on GitHub; mkdocs' Markdown wants four
SHORT_CODE = re.compile(r"<code>(?=[^<]{1,30}</code>)")


def on_config(config: Any) -> Any:
    """Adds fastgen's version to the name of the site, which is the title of each page."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "fastgen/__init__.py").read_text(), re.MULTILINE)
    config.site_name = f"{config.site_name} {version}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside of docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns the text of a page with links as they are in the site, and nested lists as mkdocs reads them."""
    folder = Path(page.file.abs_src_path).parent

    def link(match: re.Match[str]) -> str:
        target = (folder / match[0]).resolve().relative_to(ROOT).as_posix()
        return posixpath.relpath(_published(target, config, files), posixpath.dirname(page.file.src_uri))

    return NESTED.sub("    ", LINK.sub(link, markdown))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Marks short code, such as `--resume`, which site.css keeps on one line: browsers break lines after a hyphen."""
    return SHORT_CODE.sub('<code class="short">', html)


def _published(target: str, config: Any, files: Files) -> str:
    """Returns where in the site a file of the repository is; one that is no page is published as it is."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    name = f"source/{target}" + ".txt" * target.endswith(".md")
    if files.get_file_from_path(name) is None and (ROOT / target).is_file():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / target)))
    return name
